"""Offers of a client, whatever becomes of the question: no run is lost, and none in two hands."""

import asyncio

import pytest

from kvstore.agent_messages import (
    Done,
    OfferRun,
    Refused,
    ReleaseRun,
    RunLeased,
    RunOffered,
    TakeRun,
    WithdrawOffer,
)
from kvstore.client import AgentClient, RunOffer
from kvstore.errors import AgentRefused, AgentUnreachable, InvalidArgument
from tests.kvstore.client.agent_meeting import BLOCKS, NAMESPACE, begin, meet
from tests.kvstore.client.scripted_agent import AgentEnd, ScriptedAgent
from tests.patience import OPERATION_S, PATIENCE_S

TICKET = bytes(range(16))
OFFERED = RunOffered(ticket=TICKET, host="10.0.0.1:7", namespace_id=NAMESPACE.namespace_id)
OFFER = RunOffer(
    ticket=TICKET,
    host="10.0.0.1:7",
    namespace_id=NAMESPACE.namespace_id,
    layout=NAMESPACE.layout.fingerprint,
    blocks=3,
)
FULL = Refused(what="1024 runs are offered already", is_mistake=False)


async def test_offer_says_what_another_engine_must_know(
    client: AgentClient, agent: ScriptedAgent
) -> None:
    end = await meet(client, agent)
    run, _ = await begin(client, end)
    offering = asyncio.create_task(client.offer_run(run, ttl_s=12.5))
    request_id, request = await end.read(OfferRun)
    assert request == OfferRun(run=5, ttl_s=12.5)
    await end.answer(request_id, OFFERED)
    assert await offering == OFFER


async def test_run_is_not_to_be_used_while_it_is_offered_and_is_again_when_that_is_refused(
    client: AgentClient, agent: ScriptedAgent
) -> None:
    end = await meet(client, agent)
    run, _ = await begin(client, end)
    offering = asyncio.create_task(client.offer_run(run))
    request_id, _ = await end.read(OfferRun)
    for use in (lambda: run.section(0), lambda: client.fetch_run(NAMESPACE, BLOCKS.keys, run)):
        with pytest.raises(InvalidArgument, match="being offered"):
            use()
    await end.answer(request_id, FULL)
    with pytest.raises(AgentRefused, match="1024 runs are offered already"):
        await offering
    run.section(0)[:] = bytes(len(run.section(0)))
    run.release()
    assert (await end.read(ReleaseRun))[1].run == 5


async def test_run_that_is_released_while_it_is_offered_goes_back_when_that_is_refused(
    client: AgentClient, agent: ScriptedAgent
) -> None:
    end = await meet(client, agent)
    run, _ = await begin(client, end)
    offering = asyncio.create_task(client.offer_run(run))
    request_id, _ = await end.read(OfferRun)
    run.release()
    await end.answer(request_id, FULL)
    assert (await end.read(ReleaseRun))[1].run == 5
    with pytest.raises(AgentRefused):
        await offering


async def test_offer_that_nobody_waits_for_any_more_is_withdrawn(
    client: AgentClient, agent: ScriptedAgent
) -> None:
    end = await meet(client, agent)
    run, _ = await begin(client, end)
    offering = asyncio.create_task(client.offer_run(run))
    request_id, _ = await end.read(OfferRun)
    offering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await offering
    run.release()
    await end.answer(request_id, OFFERED)
    request_id, request = await end.read(WithdrawOffer)
    assert request.ticket == TICKET
    await end.answer(request_id, Done())


async def test_offer_that_was_just_made_is_withdrawn_when_it_is_given_up(
    client: AgentClient, agent: ScriptedAgent
) -> None:
    """The answer is here, and who waited for it has not run since."""
    end = await meet(client, agent)
    run, _ = await begin(client, end)
    offering = asyncio.create_task(client.offer_run(run))
    request_id, _ = await end.read(OfferRun)
    await end.answer(request_id, OFFERED)
    async with asyncio.timeout(PATIENCE_S):
        while "offered to other engines" not in repr(run):
            await asyncio.sleep(0)
    assert not offering.done()
    offering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await offering
    request_id, request = await end.read(WithdrawOffer)
    assert request.ticket == TICKET
    await end.answer(request_id, Done())


async def test_run_is_lost_when_the_agent_dies_while_it_is_offered(
    client: AgentClient, agent: ScriptedAgent
) -> None:
    end = await meet(client, agent)
    run, _ = await begin(client, end)
    offering = asyncio.create_task(client.offer_run(run))
    await end.read(OfferRun)
    agent.stop_listening()
    end.close()
    with pytest.raises(AgentUnreachable):
        await offering
    with pytest.raises(AgentUnreachable):
        run.section(0)
    run.release()


async def test_withdrawal_from_an_agent_that_is_gone_is_no_error(
    client: AgentClient, agent: ScriptedAgent
) -> None:
    end = await meet(client, agent)
    agent.stop_listening()
    end.close()
    assert not await client.withdraw_offer(OFFER)


async def begin_take(client: AgentClient, end: AgentEnd) -> tuple[asyncio.Task[object], int]:
    taking: asyncio.Task[object] = asyncio.create_task(client.take_run(NAMESPACE, OFFER))
    await end.open_namespace(3)
    request_id, request = await end.read(TakeRun)
    assert request == TakeRun(
        namespace=3,
        ticket=TICKET,
        host=OFFER.host,
        namespace_id=OFFER.namespace_id,
        layout=OFFER.layout,
        blocks=3,
        deadline_s=OPERATION_S,
    )
    return taking, request_id


async def test_run_that_comes_when_nobody_waits_for_it_any_more_is_given_back(
    client: AgentClient, agent: ScriptedAgent
) -> None:
    end = await meet(client, agent)
    taking, request_id = await begin_take(client, end)
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    await end.answer_with_run(request_id, RunLeased(9, 0, 3))
    assert (await end.read(ReleaseRun))[1].run == 9


@pytest.mark.parametrize("blocks", [2, 4])
async def test_agent_that_gives_another_number_of_blocks_than_was_offered_is_not_believed(
    client: AgentClient, agent: ScriptedAgent, blocks: int
) -> None:
    end = await meet(client, agent)
    taking, request_id = await begin_take(client, end)
    await end.answer_with_run(request_id, RunLeased(9, 0, blocks))
    with pytest.raises(AgentUnreachable, match="leased blocks"):
        await taking


async def test_nothing_is_taken_when_the_agent_has_no_run(
    client: AgentClient, agent: ScriptedAgent
) -> None:
    end = await meet(client, agent)
    taking, request_id = await begin_take(client, end)
    await end.answer(request_id, RunLeased(0, 0, 0))
    assert await taking is None
