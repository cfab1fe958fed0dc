"""Parameters by the names that a client knows, where one endpoint's request becomes another's."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from draftgate.backends.errors import RequestRejected
from draftgate.gateway.errors import InvalidRequest


@contextmanager
def named_as(params: Mapping[str, str]) -> Iterator[None]:
    """Rename the parameter that an error is about.

    Args:
        params: what the client calls a parameter; of several that fit the first one counts.
    """
    try:
        yield
    except (InvalidRequest, RequestRejected) as error:
        if isinstance(error, RequestRejected) and "messages" in params:
            params = {**params, "prompt": params["messages"]}  # workers know prompts alone
        name = client_name(error.param, params)
        if name is not None and error.param is not None and name != error.param:
            error.args = (str(error).replace(error.param, name), *error.args[1:])
            error.param = name
            if isinstance(error, InvalidRequest):
                error.message = str(error)
        raise


def client_name(param: str | None, params: Mapping[str, str]) -> str | None:
    """Return what a client calls a parameter."""
    if param is None:
        return None
    if ".function" in params and re.match(r"(tools\[\d+\]|tool_choice)\.function\b", param):
        return param.replace(".function", params[".function"], 1)
    for name, own in params.items():
        if param == name or param.startswith((f"{name}.", f"{name}[")):
            return own + param[len(name) :]
    return param
