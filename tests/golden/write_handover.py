"""Writes handover.json: golden vectors of tickets of a hand-over.

It states docs/formats/handover.md once more, msgpack by hand, without msgspec, struct and engine,
so that the two can disagree. Run: python tests/golden/write_handover.py
"""

import json
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any

FLOAT64 = {0.0: 0, 0.75: 0x3FE8000000000000, 1.0: 0x3FF0000000000000, 0.5: 0x3FE0000000000000}
"""Of the numbers that occur, the bits of IEEE 754."""


def big(value: int, size_bytes: int) -> bytes:
    return bytes(value >> 8 * at & 0xFF for at in reversed(range(size_bytes)))


def little(value: int, size_bytes: int) -> bytes:
    return big(value, size_bytes)[::-1]


def whole(value: int) -> bytes:
    if value < 0x80:
        return big(value, 1)
    for mark, size_bytes in ((0xCC, 1), (0xCD, 2), (0xCE, 4), (0xCF, 8)):
        if value < 1 << 8 * size_bytes:
            return bytes([mark]) + big(value, size_bytes)
    raise AssertionError(value)


def text(value: str) -> bytes:
    data = value.encode()
    head = bytes([0xA0 + len(data)]) if len(data) < 32 else bytes([0xD9, len(data)])
    return head + data


def binary(data: bytes) -> bytes:
    head = bytes([0xC4, len(data)]) if len(data) < 256 else bytes([0xC5]) + big(len(data), 2)
    return head + data


def array(items: list[bytes]) -> bytes:
    head = bytes([0x90 + len(items)]) if len(items) < 16 else bytes([0xDC]) + big(len(items), 2)
    return head + b"".join(items)


def mapping(members: dict[str, bytes]) -> bytes:
    head = bytes([0x80 + len(members)]) if len(members) < 16 else b"\xde" + big(len(members), 2)
    return head + b"".join(text(name) + value for name, value in members.items())


def run(facts: dict[str, Any] | None) -> bytes:
    if facts is None:
        return b"\xc0"
    return mapping(
        {
            "ticket": binary(bytes.fromhex(facts["ticket"])),
            "host": text(facts["host"]),
            "section_xxh3": array([whole(number) for number in facts["section_xxh3"]]),
        }
    )


def ids(token_ids: list[int]) -> bytes:
    return binary(b"".join(little(number, 4) for number in token_ids))


def ticket(facts: dict[str, Any], key: bytes) -> bytes:
    first = facts["replay_first"]
    body = mapping(
        {
            "namespace_id": binary(bytes.fromhex(facts["namespace_id"])),
            "prompt_ids": ids(facts["prompt_ids"]),
            "answer_ids": ids(facts["answer_ids"]),
            "max_tokens": whole(facts["max_tokens"]),
            "temperature": b"\xcb" + big(FLOAT64[facts["temperature"]], 8),
            "top_k": whole(facts["top_k"]),
            "top_p": b"\xcb" + big(FLOAT64[facts["top_p"]], 8),
            "seed": whole(facts["seed"]),
            "stop_ids": array([whole(number) for number in facts["stop_ids"]]),
            "ttl_class": text(facts["ttl_class"]),
            "replay_first": b"\xc0" if first is None else whole(first),
            "computed_tokens": whole(facts["computed_tokens"]),
            "marks": binary(bytes.fromhex(facts["marks"])),
            "blocks": run(facts["blocks"]),
            "state": run(facts["state"]),
            "moves": whole(facts["moves"]),
        }
    )
    seal = blake2b(body, digest_size=16, key=key, person=b"CACHTCKT").digest()
    return b"CACHTCKT" + little(2, 4) + little(len(body), 4) + seal + body


def digest(name: str, size_bytes: int) -> str:
    return sha256(name.encode()).digest()[:size_bytes].hex()


def vectors() -> list[dict[str, Any]]:
    dense = {
        "namespace_id": digest("namespace", 16),
        "prompt_ids": [5],
        "answer_ids": [0],
        "max_tokens": 2,
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "seed": 0,
        "stop_ids": [],
        "ttl_class": "chat",
        "replay_first": None,
        "computed_tokens": 1,
        "marks": digest("marks", 20),
        "blocks": {"ticket": digest("blocks", 16), "host": "", "section_xxh3": [2**64 - 1]},
        "state": None,
        "moves": 0,
    }
    with_state = {
        **dense,
        "prompt_ids": [number * 7919 % 129_280 for number in range(300)],
        "answer_ids": [1, 2**31 - 1, 3],
        "max_tokens": 70_000,
        "temperature": 0.75,
        "top_k": 40,
        "top_p": 0.5,
        "seed": 2**64 - 1,
        "stop_ids": [1, 128, 70_000],
        "ttl_class": "agent",
        "replay_first": 128,
        "computed_tokens": 302,
        "marks": digest("marks", 32) * 12,
        "blocks": {
            "ticket": digest("blocks", 16),
            "host": "10.0.0.1:7600",
            "section_xxh3": [0, 127, 128, 2**40 + 1],
        },
        "state": {
            "ticket": digest("state", 16),
            "host": "10.0.0.1:7600",
            "section_xxh3": list(range(43)),
        },
        "moves": 1,
    }
    sealed = [(dense, b""), (with_state, bytes.fromhex(digest("key", 32)))]
    return [
        {"fields": facts, "key": key.hex(), "bytes": ticket(facts, key).hex()}
        for facts, key in sealed
    ]


if __name__ == "__main__":
    path = Path(__file__).with_name("handover.json")
    path.write_text(json.dumps(vectors(), indent=1) + "\n")
