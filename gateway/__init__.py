"""The asyncio edge: HTTP, configuration, dispatch, telemetry and the command line."""
