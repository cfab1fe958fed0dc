"""The bodies of requests whose prompt and output are computed by different servers of vLLM.

    gateway -> prefill   max_tokens: 1, kv_transfer_params: {do_remote_decode: true, ...}
    gateway <- prefill   kv_transfer_params: {do_remote_prefill: true, remote_block_ids: ..., ...}
    gateway -> decode    the client's request with these kv_transfer_params

The server of the output copies the KV cache of the prompt from the other server. That server frees
the cache after the copy, or after a timeout without one (vLLM 0.32, `NixlConnector`). Connectors
with a store that both servers use need no parameters. Their responses contain none.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import msgspec

from draftgate.backends.base import UpstreamCall
from draftgate.backends.openai.continuation import CHATS, COMPLETIONS

SEPARABLE: Final = frozenset({CHATS, COMPLETIONS, "/v1/messages"})
"""The endpoints of vLLM whose requests and responses contain `kv_transfer_params`."""

_PARAMS: Final = "kv_transfer_params"

_COMPUTE: Final = msgspec.Raw(
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)
"""The parameters that ask for the KV cache of a prompt."""

_OF_OUTPUT: Final = ("stream_options", "min_tokens", "min_completion_tokens")
"""Fields that contradict an output of one token that is not streamed."""

_OF_PROMPT: Final = ("prompt_logprobs", "echo")
"""Fields whose response contains the log probabilities of the prompt, or the prompt."""

_EMPTY: Final = frozenset({b"null", b"false"})

_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


class NotDivisible(ValueError):
    """A request whose prompt and output must be computed by one server."""


class _Response(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


def prefill_body(body: bytes) -> bytes:
    """Return the request that computes the prompt of a request.

    Raises:
        NotDivisible: the response contains the prompt, or the body is not a JSON object.
    """
    try:
        fields = _FIELDS.decode(body)
    except (ValueError, RecursionError) as error:
        raise NotDivisible("the body is not a JSON object") from error
    for name in _OF_PROMPT:
        if bytes(fields.get(name, b"null")) not in _EMPTY:
            raise NotDivisible(f"{name} needs the prompt where the output is computed")
    for name in _OF_OUTPUT:
        fields.pop(name, None)
    one = msgspec.Raw(b"1")
    if "max_completion_tokens" in fields:
        fields["max_completion_tokens"] = one
    fields |= {"max_tokens": one, "stream": msgspec.Raw(b"false"), _PARAMS: _COMPUTE}
    return msgspec.json.encode(fields)


def direct_body(body: bytes) -> bytes:
    """Return a request without parameters of the client, which could name any block of a server."""
    return _with_params(None, body)


def decode_call(call: UpstreamCall, params: bytes | None) -> UpstreamCall:
    """Return the call for the output of a request.

    Args:
        params: the parameters that the server of the prompt has returned, or None without any.
    """
    return call._replace(rewrite=direct_body if params is None else partial(_with_params, params))


def read_params(body: bytes) -> bytes | None:
    """Return the parameters in the response of the server of a prompt, or None without any.

    Raises:
        ValueError, RecursionError: the body is not a JSON object.
    """
    found = bytes(msgspec.json.decode(body, type=_Response).kv_transfer_params)
    return None if found in {b"null", b"{}"} else found


def _with_params(params: bytes | None, body: bytes) -> bytes:
    """Return a request with other parameters. The server reports a body that is not an object."""
    try:
        fields = _FIELDS.decode(body)
    except (ValueError, RecursionError):
        return body
    if params is not None:
        fields[_PARAMS] = msgspec.Raw(params)
    elif fields.pop(_PARAMS, None) is None:
        return body
    return msgspec.json.encode(fields)
