"""The asyncio edge, with HTTP, configuration, dispatch, telemetry and the command line."""
