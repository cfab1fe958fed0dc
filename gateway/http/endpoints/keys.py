"""The endpoints `/keys` and `/audit`, with which operators manage API keys."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

import msgspec
from aiohttp import web
from msgspec import UNSET, structs

from draftgate.gateway.accounts import (
    Account,
    KeySettings,
    fingerprint_of_key,
    similar_name,
)
from draftgate.gateway.created_keys import MOST_CHANGES, Actor, CreatedKey, KeyChange, KeyNotFound
from draftgate.gateway.errors import InvalidRequest, invalid
from draftgate.gateway.http.authentication import key_of
from draftgate.gateway.http.context import (
    ACCOUNT,
    check_query,
    json_response,
    node_of_operator,
    query_number,
    read_body,
)
from draftgate.gateway.http.requests.decoding import decode
from draftgate.gateway.http.requests.schemas import KeyBody, KeyChangesBody, RotationBody
from draftgate.gateway.node import Node

PATH: Final = "/keys"
KEY_PATH: Final = "/keys/{name}"
ROTATE_PATH: Final = "/keys/{name}/rotate"
AUDIT_PATH: Final = "/audit"

SHOWN_CHANGES: Final = 100
"""Changes listed without a `limit`."""

_UNKNOWN: Final = re.compile("Object contains unknown field `(.*?)`")

_SETTINGS: Final = KeySettings.__struct_fields__

T = TypeVar("T", bound=msgspec.Struct)


class ListedKey(KeySettings, frozen=True, kw_only=True):
    """A key with its settings, and without its secret.

    Attributes:
        source: `file` for a key of the key file or of the settings, and `api` for a created one.
        fingerprint: the first 8 digits of the SHA-256 of its secret.
        expires_at: the time after which it is refused, or None.
        former_until: the times until which its earlier secrets are accepted.
    """

    name: str
    source: str
    fingerprint: str
    created_at: datetime | None = None
    expires_at: datetime | None = None
    former_until: tuple[datetime, ...] = ()


class NewKey(ListedKey, frozen=True, kw_only=True):
    """A key with a new secret, which no later response contains."""

    key: str


class KeyList(msgspec.Struct):
    """The response of `/keys`."""

    data: list[ListedKey]
    object: str = "list"


class RevokedKey(msgspec.Struct):
    """The confirmation that a key is revoked."""

    name: str
    revoked: bool = True


class AuditList(msgspec.Struct):
    """The response of `/audit`."""

    data: list[KeyChange]
    object: str = "list"


_created: Final = msgspec.json.Decoder(KeyBody)
_changes: Final = msgspec.json.Decoder(KeyChangesBody)
_rotation: Final = msgspec.json.Decoder(RotationBody)


async def list_keys(request: web.Request) -> web.Response:
    """List all keys, without their secrets.

    Raises:
        Forbidden: the API key does not belong to an operator.
    """
    node = node_of_operator(request)
    check_query(request)
    return json_response(KeyList(_listed(node)))


async def get_key(request: web.Request) -> web.Response:
    """Return a key, without its secret.

    Raises:
        Forbidden: the API key does not belong to an operator.
        KeyNotFound: no key has this name.
    """
    node, name = node_of_operator(request), request.match_info["name"]
    check_query(request)
    found = next((one for one in _listed(node) if one.name == name), None)
    if found is None:
        raise KeyNotFound(name)
    return json_response(found)


async def create_key(request: web.Request) -> web.Response:
    """Create a key, and return it with its secret.

    Raises:
        Forbidden: the API key does not belong to an operator.
        InvalidRequest: a setting is invalid.
        KeyConflict: the name exists, or there are too many keys.
        Unavailable: the store does not respond.
    """
    node = node_of_operator(request)
    body = _decoded(await read_body(request), _created)
    settings = {name: getattr(body, name) for name in _SETTINGS}
    account = Account(body.name, **settings)
    return json_response(_new(*await node.keys.create(account, body.expires_in_s, _actor(request))))


async def change_key(request: web.Request) -> web.Response:
    """Change the settings that the body names, and return the key without its secret.

    Raises:
        Forbidden: the API key does not belong to an operator.
        InvalidRequest: a setting is invalid, or the body names none.
        KeyNotFound, KeyConflict: the key does not exist, or is in the key file.
        Unavailable: the store does not respond.
    """
    node, name = node_of_operator(request), request.match_info["name"]
    body = _decoded(await read_body(request), _changes)
    given = {one: value for one, value in structs.asdict(body).items() if value is not UNSET}
    if not given:
        raise InvalidRequest("the body names no setting of a key")
    expires_in_s = given.pop("expires_in_s", UNSET)
    changed = await node.keys.change(name, given, _actor(request), expires_in_s)
    return json_response(ListedKey(**_fields_of_created(changed)))


async def rotate_key(request: web.Request) -> web.Response:
    """Give a key another secret, and return the key with this secret.

    Raises:
        Forbidden: the API key does not belong to an operator.
        InvalidRequest: the grace period is invalid.
        KeyNotFound, KeyConflict: the key does not exist, or cannot be rotated.
        Unavailable: the store does not respond.
    """
    node, name = node_of_operator(request), request.match_info["name"]
    grace_s = _decoded(await read_body(request) or b"{}", _rotation).grace_s
    return json_response(_new(*await node.keys.rotate(name, grace_s, _actor(request))))


async def revoke_key(request: web.Request) -> web.Response:
    """Revoke a key.

    Raises:
        Forbidden: the API key does not belong to an operator.
        KeyNotFound, KeyConflict: the key does not exist, or is in the key file.
        Unavailable: the store does not respond.
    """
    node, name = node_of_operator(request), request.match_info["name"]
    await node.keys.revoke(name, _actor(request))
    return json_response(RevokedKey(name))


async def list_changes(request: web.Request) -> web.Response:
    """List the latest changes of keys, newest first.

    Raises:
        Forbidden: the API key does not belong to an operator.
        InvalidRequest: the limit is not a whole number from 1 to `MOST_CHANGES`.
    """
    node = node_of_operator(request)
    check_query(request, "limit")
    limit = query_number(request, "limit", SHOWN_CHANGES, MOST_CHANGES)
    return json_response(AuditList(list(node.keys.changes[::-1][:limit])))


def _decoded(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Return the struct in a body, whose fields all have to be known.

    A misspelt limit must not create a key without it.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        found = _UNKNOWN.match(str(error))
        if found is not None:
            hint = similar_name(found[1], decoder.type.__struct_fields__)
            raise invalid(found[1], f"is not a setting of a key; {hint}") from None
    except (ValueError, RecursionError):
        pass
    return decode(body, decoder)  # whose errors name the parameter


def _actor(request: web.Request) -> Actor:
    account, key = request[ACCOUNT], key_of(request.headers)
    fingerprint = ""
    if key is not None:
        fingerprint = fingerprint_of_key(key)
    elif account.name:  # a session of a browser
        fingerprint = account.fingerprint
    return Actor(account.name, fingerprint, request.remote or "")


def _listed(node: Node) -> list[ListedKey]:
    created = [ListedKey(**_fields_of_created(one)) for one in node.keys.created]
    return [*(ListedKey(**_fields(one, "file")) for one in node.keys.of_file), *created]


def _new(created: CreatedKey, secret: str) -> NewKey:
    return NewKey(**_fields_of_created(created), key=secret)


def _fields_of_created(created: CreatedKey) -> dict[str, Any]:
    expires_s = created.expires_s
    return {
        **_fields(created.account, "api"),
        "created_at": _moment(created.created_s),
        "expires_at": None if expires_s is None else _moment(expires_s),
        "former_until": tuple(_moment(one.until_s) for one in created.former),
    }


def _fields(account: Account, source: str) -> dict[str, Any]:
    fields = structs.asdict(account)
    del fields["key"], fields["key_sha256"]
    return {**fields, "source": source, "fingerprint": account.fingerprint}


def _moment(at_s: float) -> datetime:
    return datetime.fromtimestamp(at_s, UTC)
