"""Which interfaces and addresses gloo and NCCL choose, by their own rules, and what they would be used for.

gloo, as torch makes its groups (ProcessGroupGloo): the interfaces of GLOO_SOCKET_IFNAME; without it the first address of the
host's name that can be bound here, else loopback. NCCL (ncclFindInterfaces): the running interfaces that NCCL_SOCKET_IFNAME allows, a
list of prefixes, `=` before it for whole names, `^` for all others; without it those named ib*, else all but docker*, lo* and
virbr*, else these in that order. It meets at the first of them.
"""

from __future__ import annotations

import ipaddress

from xfer.cli.doctor.facts import HostFacts, Interface

GLOO, NCCL, RENDEZVOUS = "gloo", "NCCL", "rendezvous"
LOOPBACK = "127.0.0.1"
MOST_INTERFACES = 16
"""NCCL uses no more."""
_ANY_OTHER = "^docker,lo,virbr"


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def interface_of(facts: HostFacts, address: str) -> Interface | None:
    """The interface that has an address. All of 127.0.0.0/8 is loopback's."""
    for i in facts.interfaces:
        if address in i.addresses or i.loopback and is_loopback(address):
            return i
    return None


def gloo_names(facts: HostFacts) -> list[str]:
    """The names in GLOO_SOCKET_IFNAME. torch ignores a variable of one character."""
    told = facts.settings.get("GLOO_SOCKET_IFNAME", "")
    return [n for n in told.split(",") if n] if len(told) > 1 else []


def gloo_addresses(facts: HostFacts) -> list[str]:
    """Addresses at which gloo listens; none for an interface that is not there or has no address."""
    if names := gloo_names(facts):
        some = {i.name: i.addresses for i in facts.interfaces}
        return [some[n][0] for n in names if some.get(n)]
    return [a for a in facts.own_name.addresses if interface_of(facts, a)][:1] or [LOOPBACK]


def nccl_interfaces(facts: HostFacts) -> list[Interface]:
    """Interfaces that NCCL uses for sockets, in its order."""
    usable = [i for i in facts.interfaces if i.running and _first(i, facts)]
    told = facts.settings.get("NCCL_SOCKET_IFNAME", "")
    for names in [told] if len(told) > 1 else ["ib", _ANY_OTHER, "docker", "lo", "virbr"]:
        if found := [i for i in usable if _matches(i.name, names)]:
            return found[:MOST_INTERFACES]
    return []


def uses_nccl(facts: HostFacts) -> bool:
    return bool(facts.gpus) or "NCCL_SOCKET_IFNAME" in facts.settings


def chosen(facts: HostFacts, seen: str = "") -> dict[str, list[str]]:
    """The addresses of a process that others would connect to, and what uses each.

    Args:
        seen: The address from which it reached the rendezvous. It is added because it is known to work one way.
    """
    users: dict[str, list[str]] = {a: [GLOO] for a in gloo_addresses(facts)}
    for address in [_first(i, facts) for i in nccl_interfaces(facts)] if uses_nccl(facts) else ():
        users.setdefault(address, []).append(NCCL)
    if seen:
        users.setdefault(seen, []).append(RENDEZVOUS)
    return users


def _matches(name: str, names: str) -> bool:
    others = names.startswith("^")
    names = names.removeprefix("^")
    whole = names.startswith("=")
    some = [n.partition(":")[0] for n in names.removeprefix("=").split(",") if n]
    return any(name == n if whole else name.startswith(n) for n in some) != others


def _first(interface: Interface, facts: HostFacts) -> str:
    """The first address that NCCL takes: it skips IPv6 loopback."""
    family = {"AF_INET": 4, "AF_INET6": 6}.get(facts.settings.get("NCCL_SOCKET_FAMILY", ""))
    some = (a for a in interface.addresses if a != "::1" and family in (None, ipaddress.ip_address(a).version))
    return next(some, "")
