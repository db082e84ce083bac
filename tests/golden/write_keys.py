"""Writes keys.json: golden vectors of layouts, namespaces and block keys.

It states docs/formats/keys.md once more with nothing but struct, json and hashlib, and shares no
code with kvstore, so that the two can disagree. Run: python tests/golden/write_keys.py
"""

import json
import struct
from hashlib import sha256
from pathlib import Path
from typing import Any

FLASH_SECTIONS = [["L2", 22784], ["L8", 22784], ["L14", 22784], ["L20", 45568]]

NAMESPACES: list[dict[str, Any]] = [
    {"sections": FLASH_SECTIONS, "model": "demo", "weights": "r1", "tokenizer": "t1"},
    {
        "sections": [["kv", 2949120]],
        "model": "SmolLM2-135M-Instruct",
        "weights": "Q4_1",
        "tokenizer": 'a"quote\\and\nline',
        "lora": "Größe/鲸",
        "tenant": "acme\x7f\u2028",
    },
]

# Tokens are given as [multiplier, increment, modulus, count]: token i = (a * i + b) mod m.
PROMPTS: list[dict[str, Any]] = [
    {"name": "no tokens", "tokens": [1, 0, 7, 0], "images": []},
    {"name": "one short of a block", "tokens": [7, 3, 50021, 127], "images": []},
    {"name": "one block", "tokens": [7, 3, 50021, 128], "images": []},
    {"name": "three blocks and a rest", "tokens": [7919, 11, 129280, 3 * 128 + 77], "images": []},
    {"name": "largest ids", "tokens": [0, 2**31 - 1, 2**31, 128], "images": []},
    {
        "name": "an image over a block border",
        "tokens": [7, 3, 50021, 384],
        "images": [[127, 130, "the whale"]],
    },
    {
        "name": "two images side by side, and one position at the end",
        "tokens": [7, 3, 50021, 256],
        "images": [[10, 8, "the whale"], [18, 8, "the whale"], [255, 1, "the sea"]],
    },
]


def canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def fingerprint(sections: list[list[Any]]) -> bytes:
    return sha256(canonical({"sections": [{"name": n, "bytes": b} for n, b in sections]})).digest()


def namespace_json(namespace: dict[str, Any]) -> bytes:
    members = {name: namespace[name] for name in ("model", "weights", "tokenizer")}
    members["lora"] = namespace.get("lora", "")
    members["tenant"] = namespace.get("tenant", "default")
    members["layout"] = fingerprint(namespace["sections"]).hex()
    return canonical(members)


def block_material(tokens: list[int], images: list[list[Any]], block: int) -> bytes:
    """One position after the other; at the first position of an image part, the whole part."""
    material = b""
    position = 128 * block
    while position < 128 * (block + 1):
        image = next((i for i in images if i[0] <= position < i[0] + i[1]), None)
        if image is None:
            material += struct.pack("<I", tokens[position])
            position += 1
            continue
        start, length, content = image
        end = min(start + length, 128 * (block + 1))
        words = (2**31 + end - position, position - start, length)
        material += struct.pack("<3I", *words) + sha256(content.encode()).digest()
        position = end
    return material


def block_keys(namespace_id: bytes, tokens: list[int], images: list[list[Any]]) -> list[str]:
    keys = []
    previous = namespace_id
    for block in range(len(tokens) // 128):
        previous = sha256(previous + block_material(tokens, images, block)).digest()
        keys.append(previous.hex())
    return keys


def vectors() -> dict[str, Any]:
    namespaces = []
    for namespace in NAMESPACES:
        namespace_id = sha256(namespace_json(namespace)).digest()[:16]
        prompts = []
        for prompt in PROMPTS:
            a, b, modulus, count = prompt["tokens"]
            tokens = [(a * i + b) % modulus for i in range(count)]
            keys = block_keys(namespace_id, tokens, prompt["images"])
            images = [
                [s, n, sha256(content.encode()).hexdigest()] for s, n, content in prompt["images"]
            ]
            prompts.append({**prompt, "images": images, "keys": keys})
        namespaces.append(
            {
                **namespace,
                "fingerprint": fingerprint(namespace["sections"]).hex(),
                "canonical_json": namespace_json(namespace).decode(),
                "namespace_id": namespace_id.hex(),
                "prompts": prompts,
            }
        )
    return {"format": 1, "namespaces": namespaces}


if __name__ == "__main__":
    text = json.dumps(vectors(), indent=1, ensure_ascii=True)
    Path(__file__).with_name("keys.json").write_text(text + "\n")
