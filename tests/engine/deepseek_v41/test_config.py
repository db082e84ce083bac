"""config.json: released values, round trips, and one report of everything that is wrong."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.errors import InvalidRequest, MissingModel, ModelFileError
from engine.models.deepseek_v41.config import (
    DeepseekV41Config,
    LayerKind,
    YarnScaling,
    plan_layers,
)
from engine.models.deepseek_v41.config_file import (
    config_document,
    config_text,
    parse_config,
    read_config,
)
from engine.models.deepseek_v41.config_rules import find_problems
from engine.models.deepseek_v41.shipped import SHIPPED_CONFIGS, shipped_config
from engine.models.deepseek_v41.vision.image_size import choose_image_size
from engine.models.deepseek_v41.vision.pixels import PIXELS_MAX
from kernels.reference.rope import rope_frequencies
from tests.engine.deepseek_v41.tiny_checkpoint import tiny_config
from tests.golden_folder import golden_folder

FLASH, NANO = shipped_config("v41-flash"), shipped_config("v41-nano")


def nano_document() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(config_text(NANO, quantised=True))
    return document


def kinds(config: DeepseekV41Config) -> list[LayerKind]:
    return [role.kind for role in plan_layers(config)]


@pytest.mark.parametrize("config", [FLASH, NANO, tiny_config(), replace(NANO, vision=None)])
@pytest.mark.parametrize("quantised", [False, True])
def test_config_comes_back_equal(config: DeepseekV41Config, quantised: bool) -> None:
    assert parse_config(json.loads(config_text(config, quantised=quantised))) == (config, [])


def test_config_comes_back_equal_without_yarn_engram_and_draft(tmp_path: Path) -> None:
    draft = replace(NANO.draft, stages=0)
    ratios = NANO.compress_ratios[: NANO.layers]
    bare = replace(NANO, yarn=None, engram=None, vision=None, draft=draft, compress_ratios=ratios)
    path = tmp_path / "config.json"
    path.write_text(config_text(bare, quantised=False))
    assert read_config(path) == bare


def test_vision_values_beyond_the_released_keys_come_back() -> None:
    assert NANO.vision is not None
    vision = replace(NANO.vision, norm_epsilon=1e-5, aspect_ratio_max=8.0)
    config = replace(NANO, vision=vision)
    assert parse_config(config_document(config, quantised=False)) == (config, [])


def test_unknown_shipped_config_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="v41-flash"):
        shipped_config("v41-mega")


def test_flash_has_the_released_sizes() -> None:
    engram, draft, vision = FLASH.engram, FLASH.draft, FLASH.vision
    assert engram is not None
    assert vision is not None
    assert (FLASH.vocabulary, FLASH.hidden, FLASH.layers, FLASH.heads) == (129_280, 5120, 40, 64)
    assert (FLASH.head_dim, FLASH.rope_dim, FLASH.q_rank, FLASH.window) == (512, 64, 1280, 128)
    assert FLASH.compress_ratios == (0,) * 2 + (2,) * 18 + (1,) * 20 + (0,) * 3
    assert FLASH.kv_source_ids == (2, 8, 14, 20)
    assert FLASH.index_source_ids == (2, 8, 14, 20, 24, 28, 32, 36)
    assert (FLASH.index_heads, FLASH.index_dim, FLASH.index_topk) == (32, 128, 512)
    assert (FLASH.candidate_source_id, FLASH.candidate_blocks) == (20, 2048)
    assert (FLASH.experts, FLASH.experts_per_token, FLASH.expert_intermediate) == (384, 6, 2304)
    assert (FLASH.norm_epsilon, FLASH.swiglu_limit, FLASH.routed_scaling) == (1e-20, 10.0, 1.5)
    assert engram.table_rows == (384_006_168, 384_016_682)
    assert (engram.layer_ids, engram.columns, engram.head_dim) == ((1, 14), 24, 256)
    assert (draft.stages, draft.target_layer_ids, draft.experts) == (3, (37, 38, 39), 128)
    assert (vision.layers, vision.hidden, vision.tokens_max) == (32, 1024, 1024)
    assert FLASH.image_token_id == 129_264


def test_flash_has_the_released_layer_roles() -> None:
    roles = plan_layers(FLASH)
    full = [role.index for role in roles if role.kind is LayerKind.FULL]
    assert full == [role.index for role in roles if role.owns_kv] == [2, 8, 14, 20]
    reindex = [role.index for role in roles if role.kind is LayerKind.REINDEX]
    assert reindex == [24, 28, 32, 36]
    assert kinds(FLASH).count(LayerKind.REUSE) == 30
    assert [role.kv_owner for role in roles] == [None] * 2 + [2] * 6 + [8] * 6 + [14] * 6 + [
        20
    ] * 20
    assert [role.index for role in roles if role.is_decoder] == list(range(20, 40))
    assert [role.index for role in roles if role.is_candidate_source] == [20]
    assert {role.index: role.engram for role in roles if role.engram is not None} == {1: 0, 14: 1}


def test_nano_has_every_kind_of_layer_and_small_windows() -> None:
    ratios = {(role.kind, role.ratio) for role in plan_layers(NANO)}
    assert ratios == {
        (LayerKind.WINDOW, 0),
        (LayerKind.FULL, 2),
        (LayerKind.REUSE, 2),
        (LayerKind.FULL, 1),
        (LayerKind.REUSE, 1),
        (LayerKind.REINDEX, 1),
    }
    assert NANO.engram is not None
    assert NANO.vision is not None
    assert NANO.draft.stages == 3
    assert NANO.window <= 128
    # The pool is smaller than what a prompt of a few hundred tokens has.
    assert NANO.candidate_blocks * NANO.candidate_block_entries < 100


def test_golden_config_is_read() -> None:
    config = read_config(golden_folder() / "v41" / "config.json")
    assert kinds(config)[4:] == [
        LayerKind.FULL,
        LayerKind.REUSE,
        LayerKind.REINDEX,
        LayerKind.REUSE,
    ]


def test_keys_of_other_programs_are_no_problem() -> None:
    document = nano_document()
    document |= {"transformers_version": "5.6.0", "auto_map": {"a": "b"}}
    document["text_config"] |= {"use_cache": True, "initializer_range": 0.02}
    assert parse_config(document) == (NANO, [])


def test_all_wrong_keys_are_reported_at_once(tmp_path: Path) -> None:
    document = nano_document()
    text = document["text_config"]
    del text["vocab_size"]
    text |= {"hidden_size": "64", "hidden_act": "gelu", "kv_source_layer_ids": [1, None]}
    text["rope_scaling"]["factor"] = True
    document["quantization_config"]["weight_block_size"] = [128, 128]
    del document["vision_config"]["patch_size"]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ModelFileError) as caught:
        read_config(path)
    told = {problem.split(":")[0] for problem in caught.value.problems}
    assert told >= {
        "quantization_config.weight_block_size",
        "text_config.hidden_act",
        "text_config.hidden_size",
        "text_config.kv_source_layer_ids",
        "text_config.rope_scaling.factor",
        "text_config.vocab_size",
        "vision_config.patch_size",
    }
    assert "text_config.vocab_size: given nothing, expected an integer" in caught.value.problems


RULES: dict[str, dict[str, Any]] = {
    "head_dim": {"head_dim": 48},
    "index_dim": {"index_dim": 16},
    "rope_dim": {"rope_dim": 34},
    "window": {"window": 129},
    "heads": {"heads": 3},
    "experts_per_token": {"experts_per_token": 9},
    "index_topk": {"index_topk": 34},
    "index_topk: given 21, expected 1 to 20": {"index_topk": 21, "positions_max": 20},
    "expected 1 to 16384": {"index_topk": 20_000, "positions_max": 2**31 - 1},
    "candidate_blocks: given 513, expected 1 to 512": {"candidate_blocks": 513},
    "expected 1 to 32768": {"candidate_blocks": 40_000, "positions_max": 2**31 - 1},
    "candidate_block_entries": {"candidate_block_entries": 7},
    "candidate_source_id": {"candidate_source_id": 4},
    "ascending": {"index_source_ids": (2, 5, 4, 7)},
    "to be an index source": {"index_source_ids": (2, 5, 7)},
    "neither entries nor a pool": {"index_source_ids": (2, 3, 4, 5, 7)},
    "a layer with a compress ratio": {"kv_source_ids": (1, 2, 4, 5)},
    "decoder's only one": {"kv_source_ids": (2, 4, 5, 7)},
    "not that of its kv source": {"compress_ratios": (0, 0, 2, 4, 2, 1, 1, 1, 1, 0, 0, 0)},
    "divisor of 128": {"compress_ratios": (0, 0, 3, 3, 3, 1, 1, 1, 1, 0, 0, 0)},
    "expected 1 in each decoder layer": {"compress_ratios": (0, 0, 2, 2, 2, 1, 0, 1, 1, 0, 0, 0)},
    "decoder half": {"compress_ratios": (0, 0, 2, 2, 2, 2, 2, 2, 2, 0, 0, 0)},
    "one for each of": {"compress_ratios": (0, 0, 2, 2, 2, 1, 1, 1, 1, 0, 0)},
    "of the draft stages": {"compress_ratios": (0, 0, 2, 2, 2, 1, 1, 1, 1, 0, 0, 1)},
    "bos_token_id": {"bos_token_id": 384},
    "image_token_id": {"image_token_id": None},
    "layers: given 1025": {"layers": 1025},
    "draft stages: given 1025": {"draft": replace(NANO.draft, stages=1025)},
    "experts of all layers": {"layers": 1024, "experts": 4096},
    "rope_theta": {"rope_theta": 1.0},
    "compress_rope_theta": {"compress_rope_theta": 1e-300},
    "routed_scaling": {"routed_scaling": 1e300},
    "swiglu_limit": {"swiglu_limit": 0.0},
    "norm_epsilon": {"norm_epsilon": 1e-46},
    "stream_epsilon": {"stream_epsilon": -1e-6},
}


@pytest.mark.parametrize("rule", RULES)
def test_broken_rule_is_told(rule: str) -> None:
    assert find_problems(NANO) == []
    problems = find_problems(replace(NANO, **RULES[rule]))
    assert any(rule in problem for problem in problems), problems


@given(st.tuples(st.floats(), st.floats(), st.floats(), st.floats(), st.integers(0, 2**40)))
@example((1.0, 16.0, 32.0, 1.0, 64))
@example((1e4, 16.0, 1e308, 1e308, 64))
@example((1e4, 1e-300, 32.0, 1.0, 64))
def test_frequencies_of_sound_numbers_are_numbers(
    numbers: tuple[float, float, float, float, int],
) -> None:
    theta, factor, fast, slow, positions = numbers
    yarn = YarnScaling(factor=factor, beta_fast=fast, beta_slow=slow, original_positions=positions)
    if not find_problems(replace(NANO, compress_rope_theta=theta, yarn=yarn)):
        assert rope_frequencies(NANO.rope_dim, theta, yarn).isfinite().all()


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_value_without_end_is_cut_short(key: str) -> None:
    document = nano_document()
    document["text_config"]["rope_scaling"][key] = "x" * 9999
    _, (problem,) = parse_config(document)
    assert len(problem) < 200


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_other_scaling_of_positions_is_told(key: str) -> None:
    document = nano_document()
    document["text_config"]["rope_scaling"][key] = "linear"
    expected = f"text_config.rope_scaling.{key}: given 'linear', expected \"yarn\""
    assert parse_config(document) == (None, [expected])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokens_max", 2**31 - 1),
        ("tokens_max", 30_000),
        ("pixels_min", 2**31 - 1),
        ("downsample", 10**4000),
        ("patch_pixels", 1_000),
        ("aspect_ratio_max", 1e308),
        ("aspect_ratio_max", 0.5),
    ],
)
def test_image_without_end_is_told(name: str, value: float) -> None:
    assert FLASH.vision is not None
    vision = replace(FLASH.vision, **{name: value})  # type: ignore[arg-type]
    assert any("vision" in problem for problem in find_problems(replace(FLASH, vision=vision)))


def test_image_of_the_widest_ratio_has_a_size() -> None:
    assert FLASH.vision is not None
    vision = replace(FLASH.vision, aspect_ratio_max=1e9)
    assert find_problems(replace(FLASH, vision=vision)) == []
    assert choose_image_size(1, PIXELS_MAX, vision) == choose_image_size(
        1, PIXELS_MAX, FLASH.vision
    )


def test_lists_of_layers_that_never_end_are_told_in_a_few_words() -> None:
    """Each of 1,024 layers once looked at, and named, all of its sources."""
    ratios = (0,) + (2,) * 511 + (1,) * 512 + (0,) * 3
    many = replace(NANO, layers=1024, compress_ratios=ratios, kv_source_ids=(-1,) * 100_000)
    problems = find_problems(many)
    assert "kv_source_ids: expected at most 1024 layers" in problems
    assert sum(map(len, problems)) < 10_000
    deep = replace(NANO, layers=100_000, compress_ratios=(1,) * 100_000)
    assert sum(map(len, find_problems(deep))) < 10_000


@pytest.mark.parametrize(
    ("layer_ids", "told"),
    [((0, 4), None), ((-1, 4), "encoder only"), ((1, 5), "encoder only"), ((4, 1), "ascending")],
)
def test_tables_stand_in_layers_of_the_encoder(
    layer_ids: tuple[int, ...], told: str | None
) -> None:
    assert NANO.engram is not None
    problems = find_problems(replace(NANO, engram=replace(NANO.engram, layer_ids=layer_ids)))
    assert len(problems) == (told is not None)
    assert all(told is not None and told in problem for problem in problems)


def test_tables_that_are_not_cut_by_primes_are_told() -> None:
    assert FLASH.engram is not None
    wrong = replace(FLASH.engram, table_rows=(384_006_168, 384_016_683))
    (problem,) = find_problems(replace(FLASH, engram=wrong))
    assert "384016682" in problem


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"[" * 100_000,
        b'{"text_config": ' + b"9" * 5000 + b"}",
        b'{"text_config": {"vocab_size": NaN}}',
        b'{"bos_token_id": 0, "bos_token_id": 1}',
    ],
)
def test_file_that_is_no_config_is_refused(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text)
    with pytest.raises(ModelFileError):
        read_config(path)


def test_missing_and_oversized_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingModel):
        read_config(tmp_path / "config.json")
    path = tmp_path / "config.json"
    path.write_bytes(b" " * (2 << 20))
    with pytest.raises(ModelFileError, match="at most"):
        read_config(path)


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 9),
    st.integers(),
    st.sampled_from([2**31, -(2**63), 10**400]),
    st.floats(allow_nan=False),
    st.text(max_size=5),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@given(VALUES)
def test_any_document_is_refused_without_a_crash(document: object) -> None:
    config, problems = parse_config(document)
    assert config is None
    assert problems


@given(st.data())
def test_any_value_under_any_key_is_told_or_kept(data: st.DataObject) -> None:
    document = copy.deepcopy(nano_document())
    for _ in range(data.draw(st.integers(1, 3))):
        section = data.draw(st.sampled_from([document, *_objects(document)]))
        key = data.draw(st.sampled_from(sorted(section)))
        section[key] = data.draw(VALUES | st.lists(st.integers(-1, 12), max_size=14))
    config, problems = parse_config(document)
    assert (config is None) == bool(problems)
    if config is not None:
        assert parse_config(config_document(config, quantised=True)) == (config, [])
        assert len(plan_layers(config)) == config.layers


def _objects(document: dict[str, Any]) -> list[dict[str, Any]]:
    inner = [value for value in document.values() if isinstance(value, dict) and value]
    return inner + [part for value in inner for part in _objects(value)]


def test_shipped_configs_are_listed() -> None:
    assert SHIPPED_CONFIGS == ("v41-nano", "v41-flash")


@pytest.mark.parametrize("name", SHIPPED_CONFIGS)
def test_every_key_of_a_config_is_in_the_format_page(name: str) -> None:
    page = (Path(__file__).parents[3] / "docs" / "formats" / "checkpoint.md").read_text()
    document: dict[str, Any] = config_document(shipped_config(name), quantised=False)
    keys = {*document, *document["text_config"], *document["vision_config"]}
    keys |= set(document["text_config"]["rope_scaling"]) - {"rope_type"}
    assert {key for key in keys if f"`{key}`" not in page} == set()
