"""What a client can do with a ticket that it was given: take it to an engine, and nothing else."""

from engine.handover.ticket import encode_ids
from kvstore.client import BlockingAgentClient
from tests.engine.handover.bench import REQUEST, Handover, arena_runs, changed
from tests.engine.handover.lone_engine import OpenEngine
from tests.kvstore.agent.agent_process import AgentProcess

KEY = bytes(range(32))


def test_other_tokens_cannot_be_put_to_the_blocks_of_a_sequence(
    open_engine: OpenEngine, client: BlockingAgentClient, agent: AgentProcess
) -> None:
    """They would be hits of a text that they are not of, for everybody."""
    handover = Handover.between(open_engine, client, client, ticket_key=KEY)
    expected = handover.source.answer(REQUEST, 4).token_ids
    ticket = handover.send(handover.source.answer(REQUEST, 2))
    waiting = arena_runs(agent)
    other_prompt = encode_ids([id_ + 1 for id_ in REQUEST.prompt_ids])
    for forged in (
        changed(ticket, key=KEY, prompt_ids=other_prompt),
        changed(ticket, key=KEY, replay_first=128),
        changed(ticket, key=KEY),
    ):
        assert handover.refusal(forged).what == "seal of the ticket"
    assert arena_runs(agent) == waiting, "nothing was taken"
    sequence = handover.receive(ticket)
    for _ in range(2):
        handover.target.step(sequence)
    assert sequence.token_ids == expected
    handover.close()
