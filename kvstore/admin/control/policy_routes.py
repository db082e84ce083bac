"""The routes of the policy: show it, change it, take a change back, and what it would evict.

What they may change is decided in `changes` and `kvstore.retention`; how it reaches all nodes, in
`spread`.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from ...cluster.entities import ClusterMap
from ...retention import RetentionPolicy
from ...settings import SETTINGS, Heat, Setting
from .changes import (
    ChangeBody,
    GcRunBody,
    SettingBody,
    SettingChange,
    Signature,
    SignedChange,
    apply_change,
    check_drain,
    check_node_is_known,
)
from .handle import Values, WorkerHandle
from .spread import PolicySpreader, SpreadPolicy


class PolicyRoutes:
    """Answers from the policy and the worker."""

    def __init__(self, handle: WorkerHandle, spreader: PolicySpreader) -> None:
        self._handle = handle
        self._spreader = spreader

    def router(self) -> APIRouter:
        """The routes, to be included by the application."""
        router = APIRouter(tags=["policy"])
        add = router.add_api_route
        add("/api/policy", self.show, summary="The policy, its log, and who has it")
        add("/api/policy", self.change, methods=["PUT"], summary="Change the policy")
        add("/api/policy/undo", self.undo, methods=["POST"], summary="Take the last change back")
        add("/api/settings", self.settings, summary="Every setting with its limits and value")
        add("/api/settings", self.set, methods=["PUT"], summary="Change a hot setting")
        add("/api/drain", self.drains, summary="Which nodes are draining, and how far this one is")
        add("/api/drain/{node}", self.drain, methods=["POST"], summary="Take no more writes")
        add("/api/drain/{node}", self.undrain, methods=["DELETE"], summary="Take writes again")
        add("/api/gc/plan", self.plan, summary="What would be evicted from this node now")
        add("/api/gc/plan", self.plan_changed, methods=["POST"], summary="The same after a change")
        add("/api/gc/run", self.run, methods=["POST"], summary="Evict what the policy demands now")
        return router

    async def show(self) -> Values:
        """The newest document of all nodes; `nodes` has the version on each that answers."""
        census = await self._spreader.take_census()
        newest = census.newest(self._handle.policy)
        return {
            "policy": newest.to_values(),
            "nodes": census.versions(),
            "problems": dict(census.problems),
        }

    async def _newest(self) -> RetentionPolicy:
        """What holds now, also where a change was made by way of another node a moment ago."""
        census = await self._spreader.take_census()
        return census.newest(self._handle.policy)

    async def change(self, body: SignedChange) -> Values:
        """In force on all nodes that answer when this returns; 409 if another change won."""
        at_s = self._handle.now_s()
        return _spread_values(
            await self._spreader.change(
                lambda policy: apply_change(
                    policy, body.change, who=body.who, why=body.why, at_s=at_s
                )
            )
        )

    async def undo(self, body: Signature) -> Values:
        """Undoing again goes one change further back."""
        at_s = self._handle.now_s()
        return _spread_values(
            await self._spreader.change(
                lambda policy: policy.undo(who=body.who, why=body.why, at_s=at_s)
            )
        )

    async def settings(self) -> Values:
        """Hot ones are a part of the policy; cold ones are the daemons' command lines."""
        policy = await self._newest()
        rows = [_setting_values(setting, policy) for setting in SETTINGS.values()]
        return {"policy_version": policy.version, "settings": rows}

    async def set(self, body: SettingBody) -> Values:
        """As PUT /api/policy with a change of the kind "setting"."""
        change = SettingChange(kind="setting", name=body.name, value=body.value)
        return await self.change(SignedChange(change=change, who=body.who, why=body.why))

    async def drains(self) -> Values:
        """`report` is of this worker's own node: null unless it drains and has counted."""
        return {
            "draining": sorted((await self._newest()).draining),
            "node": self._handle.node,
            "report": self._handle.report("drain"),
        }

    async def drain(self, node: str, body: Signature) -> Values:
        """The node goes on serving what it has."""
        return await self._set_draining(node, True, body)

    async def undrain(self, node: str, body: Signature) -> Values:
        """The node is written to again within seconds."""
        return await self._set_draining(node, False, body)

    async def _set_draining(self, node: str, is_draining: bool, body: Signature) -> Values:
        at_s, cluster_map = self._handle.now_s(), self._handle.map

        def make(policy: RetentionPolicy) -> RetentionPolicy:
            _check(cluster_map, policy, node, is_draining=is_draining)
            return policy.with_draining(node, is_draining, who=body.who, why=body.why, at_s=at_s)

        return _spread_values(await self._spreader.change(make))

    async def plan(self) -> Values:
        """A dry run: by class, reason and age. Changes nothing."""
        return await self._handle.plan_gc(await self._newest())

    async def plan_changed(self, body: ChangeBody) -> Values:
        """What a change of the policy would cost, before it is made. Changes nothing."""
        at_s = self._handle.now_s()
        policy = apply_change(await self._newest(), body.change, who="plan", why="", at_s=at_s)
        return await self._handle.plan_gc(policy)

    async def run(self, body: GcRunBody) -> Values:
        """Returns when it is done or the time is up; then it goes on by itself."""
        return await self._handle.run_gc(deadline_s=body.deadline_s)


def _check(
    cluster_map: ClusterMap, policy: RetentionPolicy, node: str, *, is_draining: bool
) -> None:
    if is_draining:
        check_drain(cluster_map, policy.draining, node)
    elif node not in policy.draining:
        # A node that was taken off the map while it drained may still be taken off the list.
        check_node_is_known(cluster_map, node)


def _spread_values(spread: SpreadPolicy) -> Values:
    return {
        "policy": spread.policy.to_values(),
        "nodes": list(spread.nodes),
        "missing": dict(spread.missing),
        "is_changed": spread.is_changed,
    }


def _setting_values(setting: Setting, policy: RetentionPolicy) -> dict[str, Any]:
    is_hot = setting.heat is Heat.HOT
    return {
        "name": setting.name,
        "heat": setting.heat.value,
        "unit": setting.unit,
        "default": setting.default,
        "value": policy.setting(setting.name) if is_hot else None,
        "is_set": setting.name in policy.settings,
        "low": None if setting.is_switch or not is_hot else setting.low,
        "high": None if setting.is_switch or not is_hot else setting.high,
        "what_for": setting.what_for,
    }
