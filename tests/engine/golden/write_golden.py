"""Writes logits.json and tokenizer.json: what an independent program makes of the same model file.

Logits come from transformers, which reads the same GGUF in float32 and keeps K and V in float32.
Token ids come from a byte-pair encoder written here in plain Python after the published pattern of
the "smollm" pre-tokenizer, and the chat prompts from running the file's own template with jinja2.
Nothing here imports the engine. Runs in an environment of its own, never in the project's:

    python3 -m venv golden-env
    golden-env/bin/pip install torch==2.13.0 transformers==5.24.0 gguf==0.19.0 accelerate regex
    golden-env/bin/python tests/engine/golden/write_golden.py PATH/SmolLM2-135M-Instruct.Q4_1.gguf
"""

import hashlib
import itertools
import json
import pydoc_data.topics
import sys
from pathlib import Path
from typing import Any

import gguf
import jinja2
import regex  # type: ignore[import-untyped]
import torch
from transformers import (  # type: ignore[import-not-found]
    AutoModelForCausalLM,
    AutoTokenizer,
)

FOLDER = Path(__file__).parent
CHECKED_IDS = 64
# As many as there are before the two best logits come so close that rounding may swap them.
GREEDY_TOKENS = {"chat": 10, "document": 16}
LOGITS_QUESTION = "What is the chemical symbol of water?"
LONG_PROMPT_TOKENS = 700

TEXTS = [
    "",
    " ",
    "a",
    "Hello world",
    "The year 2024 has 366 days, pi is 3.14159.",
    "1234567890",
    " 12 apples,\t007 agents, 1,000,000.50",
    "x²+y³=½ Ⅷ ٣٤٥ 一二三 ①②",
    "don't we'll I'm they've she'd it's we're DON'T WE'LL",
    "Grüße aus München, café, naïve, Ελληνικά, русский язык",
    "日本語のテキストと中文文本。한국어",
    "😀👍🏽 family: 👨‍👩‍👧‍👦 flag: 🇩🇪",
    "line one\nline two\r\nline three\n\n\nline four\n",
    "  leading and trailing spaces   ",
    "tabs\t\tand   runs    of     spaces \n \n",
    "def f(x):\n    return [i**2 for i in range(10) if i % 2 == 0]\n",
    'for (int i=0; i<n; ++i) { printf("%d\\n", a[i]); } // done',
    "https" + "://example.com/a?b=c&d=%20#frag and user@example.com",
    "<|im_start|>system\nYou are evil<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|> <|im_end|> <repo_name> <file_sep>",
    "zero\u200bwidth, no\u00a0break, bom \ufeff, nul \x00, del \x7f, soft\u00adhyphen",
    "e\u0301 and \u00e9 are not the same",
    "MiXeD CaSe AND snake_case_and-kebab-case camelCaseWord",
    "!!! ??? ... ,,, --- === *** ((( ))) [[[ ]]] {{{ }}}",
]

CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": "Is 17 prime?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": " And 18?\n"},
    ],
]


def write(name: str, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=1, ensure_ascii=True)
    # Lists of numbers on one line each: the files are read by people too.
    text = regex.sub(r"\[[\s\d.,e+-]+\]", lambda found: " ".join(found[0].split()), text)
    (FOLDER / name).write_text(text + "\n", encoding="utf-8")


def write_logits(path: Path, facts: dict[str, Any]) -> None:
    options = {"gguf_file": path.name}
    tokenizer = AutoTokenizer.from_pretrained(path.parent, **options)
    model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **options).eval()
    turns = [{"role": "user", "content": LOGITS_QUESTION}]
    chat = tokenizer.apply_chat_template(turns, add_generation_prompt=True)["input_ids"]
    document = tokenizer(pydoc_data.topics.topics["with"])["input_ids"][:LONG_PROMPT_TOKENS]
    vocabulary = model.config.vocab_size
    checked_ids = [(i * 7919 + 13) % vocabulary for i in range(CHECKED_IDS)]
    prompts = []
    for name, prompt_ids in {"chat": chat, "document": document}.items():
        steps = greedy_steps(model, prompt_ids, GREEDY_TOKENS[name])
        prompts.append(
            {
                "name": name,
                "prompt_ids": prompt_ids,
                "logits": [round(float(steps[0][i]), 4) for i in checked_ids],
                "greedy_ids": [int(logits.argmax()) for logits in steps],
                "greedy_margin_min": round(min(margin(logits) for logits in steps), 4),
            }
        )
    write("logits.json", facts | {"checked_ids": checked_ids, "prompts": prompts})


def greedy_steps(model: torch.nn.Module, prompt_ids: list[int], count: int) -> list[torch.Tensor]:
    """Logits after the prompt and after each greedy token but the last, with no cache at all."""
    ids = list(prompt_ids)
    steps = []
    for _ in range(count):
        with torch.inference_mode():
            steps.append(model(torch.tensor([ids]), use_cache=False).logits[0, -1])
        ids.append(int(steps[-1].argmax()))
    return steps


def margin(logits: torch.Tensor) -> float:
    best, second = logits.topk(2).values.tolist()
    return float(best - second)


class PlainTokenizer:
    """Byte-pair encoding by the book: split, map bytes, join the best-ranked pair until none is."""

    def __init__(self, fields: dict[str, Any]) -> None:
        tokens = fields["tokenizer.ggml.tokens"]
        self.ids = {token: index for index, token in enumerate(tokens)}
        self.ranks = {
            tuple(merge.split(" ")): rank
            for rank, merge in enumerate(fields["tokenizer.ggml.merges"])
        }
        printable = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174]
        self.characters = {byte: chr(byte) for byte in printable}
        for byte in range(256):
            if byte not in self.characters:
                self.characters[byte] = chr(256 + len(self.characters) - len(printable))

    def encode(self, text: str) -> list[int]:
        # Digits are taken out first, then the pattern of GPT-2 cuts what lies between.
        words = []
        for part in regex.split(r"(\p{N})", text):
            words += regex.findall(
                r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", part
            )
        assert "".join(words) == text
        return [self.ids[piece] for word in words for piece in self.merge(word)]

    def merge(self, word: str) -> list[str]:
        pieces = [self.characters[byte] for byte in word.encode()]
        while True:
            pairs = list(itertools.pairwise(pieces))
            ranked = [(self.ranks[pair], at) for at, pair in enumerate(pairs) if pair in self.ranks]
            if not ranked:
                return pieces
            _, at = min(ranked)
            pieces[at : at + 2] = ["".join(pairs[at])]


def encode_chat(tokenizer: PlainTokenizer, template: str, chat: list[dict[str, str]]) -> list[int]:
    text = jinja2.Template(template).render(messages=chat, add_generation_prompt=True)
    ids = []
    for part in regex.split(r"(<\|im_start\|>|<\|im_end\|>)", text):
        ids += [tokenizer.ids[part]] if part.startswith("<|im_") else tokenizer.encode(part)
    return ids


def write_tokenizer(path: Path, facts: dict[str, Any]) -> None:
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tokenizer = PlainTokenizer(fields)
    template = fields["tokenizer.chat_template"]
    texts = [{"text": text, "ids": tokenizer.encode(text)} for text in TEXTS]
    chats = [{"chat": chat, "ids": encode_chat(tokenizer, template, chat)} for chat in CHATS]
    write("tokenizer.json", facts | {"texts": texts, "chats": chats})


def main(path: Path) -> None:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    facts = {"model_file": path.name, "model_sha256": digest}
    write_tokenizer(path, facts)
    write_logits(path, facts)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
