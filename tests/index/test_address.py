"""URLs of Redis as users write them, right and wrong."""

import pytest

from kvstore.core import BadConfiguration
from kvstore.index.address import parse

GOOD = {
    "redis://host": ("single", (("host", 6379),), False, None, None, 0, ""),
    "redis://host:1/3": ("single", (("host", 1),), False, None, None, 3, ""),
    "redis://:p%40ss@host": ("single", (("host", 6379),), False, None, "p@ss", 0, ""),
    "rediss://me:pw@[::1]:7/0": ("single", (("::1", 7),), True, "me", "pw", 0, ""),
    "unix:///run/redis.sock": ("unix", (), False, None, None, 0, ""),
    "unix:///run/redis.sock?db=2&password=pw": ("unix", (), False, None, "pw", 2, ""),
    "redis+sentinel://a:1,b/main": ("sentinel", (("a", 1), ("b", 26379)), False, None, None, 0, "main"),
    "rediss+sentinel://u:p@a/main/4": ("sentinel", (("a", 26379),), True, "u", "p", 4, "main"),
    "redis+cluster://u:p@a:1,b:2,c:3": ("cluster", (("a", 1), ("b", 2), ("c", 3)), False, "u", "p", 0, ""),
    "rediss+cluster://a?ssl_ca_certs=/ca.pem": ("cluster", (("a", 6379),), True, None, None, 0, ""),
}


@pytest.mark.parametrize(("url", "expected"), GOOD.items(), ids=GOOD)
def test_a_right_url_is_read(url, expected) -> None:
    address = parse(url)
    fields = ("kind", "hosts", "tls", "username", "password", "db", "service")
    assert tuple(getattr(address, name) for name in fields) == expected


def test_options_and_paths_are_read() -> None:
    assert parse("unix:///run/a%20b.sock").path == "/run/a b.sock"
    options = parse("rediss+sentinel://a/main?sentinel_password=x&ssl_cert_reqs=none").options
    assert options == {"sentinel_password": "x", "ssl_cert_reqs": "none"}


WRONG = {
    "http://host": "redis\\+cluster",
    "host:6379": "not known",
    "redis://": "host is missing",
    "redis://a,b": "redis\\+sentinel",
    "redis://host/zero": "database",
    "redis://host/0/1": "database",
    "redis://host:port": "host:port",
    "redis://host:99999": "host:port",
    "redis://host?timeout=3": "'timeout'; known are ssl_ca_certs",
    "redis://[::1": "brackets",
    "redis://host?ssl_cert_reqs=none": "is for TLS; write rediss://",
    "redis+cluster://host?ssl_cert_reqs=none": "write rediss\\+cluster://",
    "redis+sentinel://a:1": "service is missing",
    "redis+cluster://a/1": "database 0 only",
    "unix://": "path of the socket",
    "unix:///a?db=x": "database",
}


@pytest.mark.parametrize(("url", "why"), WRONG.items(), ids=WRONG)
def test_a_wrong_url_says_what_would_be_right(url, why) -> None:
    with pytest.raises(BadConfiguration, match=why):
        parse(url)


@pytest.mark.parametrize(
    "url",
    ["redis://me:s3cret@host/x", "htp://:s3cret@h", "unix:///a?password=s3cret&db=x", "redis://:s3cret@h:x"],
)
def test_a_password_is_never_shown(url) -> None:
    with pytest.raises(BadConfiguration) as caught:
        parse(url)
    assert "s3cret" not in str(caught.value)
    assert "s3cret" not in parse("redis://me:s3cret@host/1").shown
    assert "s3cret" not in parse("unix:///a?password=s3cret").shown
