"""Addresses of the cluster map: "host:port", an IPv6 host in brackets. Pure."""

import re
from ipaddress import IPv6Address, ip_address

ADDRESS_RULE = '"host:port" with a port from 1 to 65535'
REACHABLE_RULE = f"{ADDRESS_RULE}, which others can connect to"
IPV6_PATTERN = re.compile(r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%[A-Za-z0-9._-]+)?")
HOST_LABEL_PATTERN = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")


def host_of(address: str) -> str:
    """The host of "host:port", without the brackets of IPv6."""
    return address.rpartition(":")[0].removeprefix("[").removesuffix("]")


def port_of(address: str) -> int:
    """The port of "host:port"."""
    return int(address.rpartition(":")[2])


def is_address(address: str) -> bool:
    """Whether the text is host:port with an IPv4 address, a host name, or [IPv6]."""
    host, _, port = address.rpartition(":")
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and 1 <= int(port) <= 65535
    if not is_port:
        return False
    if host.startswith("[") and host.endswith("]"):
        return _is_ipv6(host[1:-1])
    labels = host.split(".")
    if labels[-1].isdigit():  # no host name ends in a number, so this must be an IPv4 address
        return _is_ip(host)
    return len(host) <= 253 and all(HOST_LABEL_PATTERN.fullmatch(label) for label in labels)


def is_reachable_address(address: str) -> bool:
    """Whether others can be told to connect there: not at "all interfaces", not at a group."""
    if not is_address(address):
        return False
    host = host_of(address)
    if not _is_ip(host):
        return True
    found = ip_address(host)
    return not (found.is_unspecified or found.is_multicast)


def is_loopback(host: str) -> bool:
    """Whether a host, as an address or as "localhost", is this machine alone."""
    return ip_address(host).is_loopback if _is_ip(host) else host.lower() == "localhost"


def canonical_address(address: str) -> str:
    """The one spelling of a valid address: equal texts are equal addresses, without resolving."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]").lower()
    if _is_ipv6(host):
        host = f"[{IPv6Address(host)}]"
    return f"{host}:{int(port)}"


def _is_ip(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _is_ipv6(host: str) -> bool:
    return IPV6_PATTERN.fullmatch(host) is not None and _is_ip(host)
