"""Tests of the reader of server addresses and of the mask of their secrets."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.addresses import MASK, mask_url, read_server_url, same_server, split_credentials

SECRET = "m4rk3r"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("http://localhost:8000", "http://localhost:8000"),
        (" http://localhost:8000/ ", "http://localhost:8000"),
        ("http://localhost:8000/v1", "http://localhost:8000"),
        ("http://localhost:8000/v1/", "http://localhost:8000"),
        ("HTTPS://Host/openai/v1//", "https://Host/openai"),
        ("http://[::1]:8000/v1", "http://[::1]:8000"),
        ("http://user:p%40ss@host/v1", "http://user:p%40ss@host"),
        ("http://h/v1x", "http://h/v1x"),
        ("http://bücher.example", "http://bücher.example"),
    ],
)
def test_path_of_the_api_is_not_part_of_the_address(text: str, found: str) -> None:
    """The reader drops a final slash and a final `/v1`, and reads its own result unchanged."""
    assert read_server_url(text) == found == read_server_url(found)


@pytest.mark.parametrize(
    ("text", "suggested"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("localhost", "http://localhost"),
        ("gpu-1.example:8000/v1", "http://gpu-1.example:8000"),
        ("10.0.0.5:8000/", "http://10.0.0.5:8000"),
        ("[::1]:8000", "http://[::1]:8000"),
        (f"user:{SECRET}@gpu-1:8000", f"http://{MASK}@gpu-1:8000"),
    ],
)
def test_missing_scheme_is_suggested(text: str, suggested: str) -> None:
    """The error for an address without a scheme contains the address with `http://`."""
    with pytest.raises(ValueError, match="expected an address such as http://") as caught:
        read_server_url(text)
    assert str(caught.value).endswith(f"; did you mean {suggested}?")
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "such as http://"),
        ("http://", "such as http://"),
        ("http:/localhost:8000", "such as http://"),
        ("http://host:0", "such as http://"),
        ("http://host:99999", "such as http://"),
        ("http://host:", "such as http://"),
        ("http://a b", "such as http://"),
        ("http://[::1", "such as http://"),
        ("grpc://host", "such as http://"),
        ("unix:///run/x.sock", "such as http://"),
        (f"http://u:{SECRET}/x@host", "such as http://"),
        (f"http://u:{SECRET}@host?key={SECRET}", f"such as http://{MASK}@host$"),
        ("http://host/#page", "such as http://host$"),
        ("http://host/v1/chat/completions", "such as http://host$"),
        (f"http://u:{SECRET}@host/a/v1/models", f"such as http://{MASK.replace('*', '.')}@host/a$"),
    ],
)
def test_other_texts_are_rejected_without_their_secrets(text: str, message: str) -> None:
    """The error for any other text says what was expected, and contains no password."""
    with pytest.raises(ValueError, match=message.replace("*", r"\*")) as caught:
        read_server_url(text)
    assert SECRET not in str(caught.value)


def test_equal_servers_have_equal_keys() -> None:
    """Case and the default port make no other server."""
    texts = ("http://Host", "http://host:80", "HTTP://host/v1/")
    assert len({same_server(read_server_url(text)) for text in texts}) == 1
    assert same_server("http://host") != same_server("https://host")
    assert same_server("http://host/a") != same_server("http://host/b")


@given(st.text(min_size=1), st.text())
def test_credentials_survive_their_quotation(user: str, password: str) -> None:
    """Quoted credentials are read as they were, and are no part of the address."""
    quoted = f"{quote(user, safe='')}:{quote(password, safe='')}"
    url, found = split_credentials(read_server_url(f"http://{quoted}@host:8000/v1"))
    assert (url, found) == ("http://host:8000", (user, password))


@given(
    st.sampled_from(
        ["{}", "http://{}", "http://a,http://{}", "x@a,http://{}", "//{}", "redis+x://{}"]
    ),
    st.sampled_from(["u:{}@h", ":{}@h", "{}@h/p", "h?password={}", "h?x=1&API_KEY={}&y=2"]),
    st.sampled_from(["", "@", "://", "/", "?", ","]),
)
def test_mask_covers_secrets_in_any_text(text: str, place: str, around: str) -> None:
    """A masked text has no secret, also if it is no address."""
    if around == "@" or "?" not in place:
        assert SECRET not in mask_url(text.format(place.format(f"{around}{SECRET}{around}")))
    else:
        assert SECRET not in mask_url(text.format(place.format(SECRET)))
