"""Changing the policy of a whole cluster: read the newest, make the next, tell every node.

There is no leader. Each node takes a document that is newer than its own, so all nodes end with the
same one, whoever told them. Two changes at one time make two documents of one version, of which one
wins everywhere; the other one is answered with a conflict and was never in force for longer than
that took. A node that does not answer is told later by the workers, which compare all the time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from ... import wire
from ...errors import InvalidArgument, NodeError, ProtocolError
from ...retention import RetentionPolicy
from .changes import Changer
from .handle import WorkerHandle
from .problems import Conflict

ASK_DEADLINE_S = 1.0
"""A change has three rounds of questions; with silent nodes it is still done within 5 s."""
SETTLE_S = 0.2
"""A rival that read the policy before our change reached its node has told all nodes by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyCensus:
    """Which node has which document, and why others did not say."""

    policies: Mapping[str, RetentionPolicy]
    problems: Mapping[str, str]

    def newest(self, known: RetentionPolicy) -> RetentionPolicy:
        """The newest of all documents and of `known`."""
        found = known
        for policy in self.policies.values():
            if policy.is_newer_than(found):
                found = policy
        return found

    def versions(self) -> dict[str, int]:
        """The version on each node that answered."""
        return {node: policy.version for node, policy in self.policies.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadPolicy:
    """A change that is in force. `missing`: nodes that do not have it yet, and why."""

    policy: RetentionPolicy
    nodes: tuple[str, ...]
    missing: Mapping[str, str]
    is_changed: bool = True
    """False: it was so already, and there is no new version."""


class PolicySpreader:
    """Reads and changes the policy through one worker. One change at a time."""

    def __init__(
        self, handle: WorkerHandle, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._handle = handle
        self._sleep = sleep
        self._turn = asyncio.Lock()

    async def take_census(self) -> PolicyCensus:
        """Ask every node for its document."""
        return await self._tell_all(b"")

    async def change(self, make: Changer) -> SpreadPolicy:
        """Put `make(newest)` in force. If that changes nothing, nobody is told.

        Raises InvalidArgument from `make`, NodeError if no node took it, and Conflict if another
        change of the same version won.
        """
        async with self._turn:
            before = await self.take_census()
            newest = before.newest(self._handle.policy)
            made = make(newest)
            if made == newest:
                return self._find_unchanged(newest, before)
            await self._tell_all(made.to_json())
            await self._sleep(SETTLE_S)
            after = await self.take_census()
        return self._judge(made, after)

    def _find_unchanged(self, policy: RetentionPolicy, census: PolicyCensus) -> SpreadPolicy:
        nodes = tuple(node for node, found in census.policies.items() if found == policy)
        others = {node: "has an older version" for node in census.policies if node not in nodes}
        missing = {**census.problems, **others}
        return SpreadPolicy(policy=policy, nodes=nodes, missing=missing, is_changed=False)

    def _judge(self, made: RetentionPolicy, after: PolicyCensus) -> SpreadPolicy:
        nodes = tuple(node for node, policy in after.policies.items() if contains(policy, made))
        newest = after.newest(made)
        self._handle.take_policy(newest)
        if not contains(newest, made):
            raise Conflict(
                "policy",
                given=f"version {made.version} by {made.log[-1].who} was not taken over",
                expected=f"version {newest.version} is in force ({_describe_last(newest)}); look at"
                " it and decide again",
            )
        if not nodes:
            node, detail = next(iter(after.problems.items()), (self._handle.node, "has another"))
            raise NodeError(node, f"no node took the policy: {detail}")
        others = {node: "has an older version" for node in after.policies if node not in nodes}
        return SpreadPolicy(policy=made, nodes=nodes, missing={**after.problems, **others})

    async def _tell_all(self, document: bytes) -> PolicyCensus:
        """Send `document`, or nothing, to every node; each answers with what it has then."""
        policies: dict[str, RetentionPolicy] = {}
        problems: dict[str, str] = {}

        async def tell(node: str) -> None:
            try:
                policies[node] = await self._tell(node, document)
            except NodeError as error:
                problems[node] = error.detail

        nodes = [node.name for node in self._handle.map.nodes]
        await asyncio.gather(*(tell(node) for node in nodes))
        # In the map's order, whatever the order of the answers was.
        return PolicyCensus(
            policies={node: policies[node] for node in nodes if node in policies},
            problems={node: problems[node] for node in nodes if node in problems},
        )

    async def _tell(self, node: str, document: bytes) -> RetentionPolicy:
        answer = await self._handle.ask(
            node, wire.Op.POLICY, body=document, count=len(document), deadline_s=ASK_DEADLINE_S
        )
        try:
            return RetentionPolicy.parse(answer)
        except InvalidArgument as error:
            raise ProtocolError(node, f"its policy is not one: {error}") from error


def contains(policy: RetentionPolicy, made: RetentionPolicy) -> bool:
    """Whether `policy` is `made`, or was made from it by later changes."""
    return policy == made or made.log[-1] in policy.log


def _describe_last(policy: RetentionPolicy) -> str:
    if not policy.log:
        return "the default"
    last = policy.log[-1]
    return f"{last.what} by {last.who}"
