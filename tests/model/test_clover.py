"""The model: golden numbers, commits in pieces, previews that touch nothing, interruptions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from clover_local.cache import SequenceState
from clover_local.config import ModelConfig
from clover_local.experts.protocol import ExpertResults, Experts, Uncached
from clover_local.experts.resident import ResidentExperts
from clover_local.kernels import linear
from clover_local.kernels.route import AnyRouting
from clover_local.model.clover import Clover

EmptyState = Callable[[ModelConfig], SequenceState]
RandomModel = Callable[[ModelConfig], Clover]
RandomParameters = Callable[[ModelConfig], dict[str, Tensor]]
Expected = Mapping[str, Tensor]
Cases = Mapping[str, Any]


class Failing(Uncached):
    """Experts that raise on their `left`th call from now."""

    def __init__(self, experts: Experts, *, error: BaseException) -> None:
        self.experts = experts
        self.error = error
        self.left = 0

    waits_because = "a test"

    def forward(self, layer: int, x: Tensor, *, routing: AnyRouting) -> ExpertResults:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return self.experts.forward(layer, x, routing=routing)


def snapshot(state: SequenceState) -> list[Tensor]:
    """Copies of everything a state holds."""
    tensors = [*state.committed.recurrent, *state.committed.conv]
    for layer in state.attention_layers:
        tensors += state.keys_values(layer)
    return [torch.tensor(state.committed.tokens), *(x.clone() for x in tensors)]


def assert_same_bits(state: SequenceState, before: list[Tensor]) -> None:
    after = snapshot(state)
    assert len(after) == len(before)
    for new, old in zip(after, before, strict=True):
        assert torch.equal(new, old)


def assert_golden(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-5)


def token_ids(count: int, config: ModelConfig) -> list[int]:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(config.vocab_size, (count,), generator=generator).tolist()


@pytest.fixture
def after_prompt(
    golden_model: Clover, golden_cases: Cases, empty_state: EmptyState
) -> SequenceState:
    state = empty_state(golden_model.config)
    golden_model.commit(golden_cases["prompt"], state, logits="none")
    return state


def test_golden_commit_of_the_prompt(
    golden_model: Clover, golden_cases: Cases, golden_expected: Expected, empty_state: EmptyState
) -> None:
    state = empty_state(golden_model.config)
    out = golden_model.commit(golden_cases["prompt"], state, logits="all")
    assert_golden(out.logits, golden_expected["prompt_logits"])
    for layer in range(3):
        recurrent, conv = state.committed.recurrent[layer], state.committed.conv[layer]
        assert_golden(recurrent, golden_expected[f"state.{layer}.recurrent"])
        assert_golden(conv, golden_expected[f"state.{layer}.conv"])
    keys, values = state.keys_values(3)
    assert_golden(keys, golden_expected["state.3.k"])
    assert_golden(values, golden_expected["state.3.v"])


def test_golden_commit_of_a_block(
    golden_model: Clover,
    golden_cases: Cases,
    golden_expected: Expected,
    after_prompt: SequenceState,
) -> None:
    out = golden_model.commit(golden_cases["commit_block"], after_prompt, logits="all")
    assert_golden(out.logits, golden_expected["commit_logits"])


@pytest.mark.parametrize("rows", [16, 32])
def test_golden_preview_of_masks(
    rows: int,
    golden_model: Clover,
    golden_cases: Cases,
    golden_expected: Expected,
    after_prompt: SequenceState,
) -> None:
    out = golden_model.preview([golden_model.config.mask_token_id] * rows, after_prompt)
    name = {16: "preview_block16", 32: "preview_all_masked"}[rows]
    assert_golden(out.logits, golden_expected[name])
    if rows == 32:
        assert [x.tolist() for x in out.coresets] == golden_cases["coreset_all_masked"]


def test_golden_preview_of_a_partly_resolved_block(
    golden_model: Clover,
    golden_cases: Cases,
    golden_expected: Expected,
    after_prompt: SequenceState,
) -> None:
    out = golden_model.preview(golden_cases["partial_block"], after_prompt)
    assert_golden(out.logits, golden_expected["preview_partial"])
    assert [x.tolist() for x in out.coresets] == golden_cases["coreset_partial"]


def test_golden_preview_over_an_empty_prefix(
    golden_model: Clover, golden_expected: Expected, empty_state: EmptyState
) -> None:
    config = golden_model.config
    out = golden_model.preview([config.mask_token_id] * 32, empty_state(config))
    assert_golden(out.logits, golden_expected["preview_empty_prefix"])


@pytest.mark.parametrize(
    "pieces",
    [[1] * 9, [1, 31, 2, 64, 33, 32], [33, 1, 1, 2, 64], [200, 3]],
    ids=lambda pieces: "-".join(map(str, pieces)),
)
@pytest.mark.parametrize("shape", ["golden", "odd"])
def test_pieces_equal_one_pass(
    shape: str,
    pieces: Sequence[int],
    golden_model: Clover,
    odd_config: ModelConfig,
    random_model: RandomModel,
    empty_state: EmptyState,
) -> None:
    model = golden_model if shape == "golden" else random_model(odd_config)
    tokens = token_ids(sum(pieces), model.config)
    one, many = empty_state(model.config), empty_state(model.config)
    whole = model.commit(tokens, one, logits="all").logits
    parts = []
    for size in pieces:
        piece = tokens[many.length : many.length + size]
        parts.append(model.commit(piece, many, logits="all").logits)
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=2e-5)
    for got, expected in zip(snapshot(many), snapshot(one), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=2e-5)


def test_long_text_in_chunks_equals_other_chunks(
    golden_model: Clover, empty_state: EmptyState
) -> None:
    config = golden_model.config
    tokens = token_ids(1000, config)
    last = []
    for size in (333, 256):
        state = empty_state(config)
        for start in range(0, len(tokens), size):
            out = golden_model.commit(tokens[start : start + size], state)
        last.append(out.logits)
    torch.testing.assert_close(last[0], last[1], rtol=0, atol=2e-5)


@pytest.mark.parametrize("rows", [1, 2, 31, 32])
def test_preview_leaves_every_bit_of_the_state(
    rows: int, golden_model: Clover, after_prompt: SequenceState
) -> None:
    before, committed = snapshot(after_prompt), after_prompt.committed
    golden_model.preview([golden_model.config.mask_token_id] * rows, after_prompt)
    assert after_prompt.committed is committed
    assert_same_bits(after_prompt, before)


def test_preview_leaves_points_beyond_a_rewind_restorable(
    golden_model: Clover, after_prompt: SequenceState
) -> None:
    start = after_prompt.checkpoint()
    golden_model.commit([7, 8, 9], after_prompt)
    late, before = after_prompt.checkpoint(), snapshot(after_prompt)
    after_prompt.rewind(start)
    golden_model.preview([golden_model.config.mask_token_id] * 32, after_prompt)
    after_prompt.rewind(late)
    assert_same_bits(after_prompt, before)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("out of memory")], ids=repr)
@pytest.mark.parametrize("call", [1, 3, 5])
def test_failure_amid_a_commit_leaves_the_state_unchanged_and_usable(
    call: int,
    error: BaseException,
    odd_config: ModelConfig,
    random_model: RandomModel,
    empty_state: EmptyState,
) -> None:
    model = random_model(odd_config)
    failing = Failing(model.layers[0].moe.experts, error=error)
    for layer in model.layers:
        layer.moe.experts = failing
    first, second = token_ids(40, odd_config), token_ids(300, odd_config)
    state, undisturbed = empty_state(odd_config), empty_state(odd_config)
    for each in (state, undisturbed):
        model.commit(first, each)
    before = snapshot(state)
    failing.left = call
    with pytest.raises(type(error)):
        model.commit(second, state)
    assert_same_bits(state, before)
    got = model.commit(second[:50], state).logits
    assert torch.equal(got, model.commit(second[:50], undisturbed).logits)
    assert_same_bits(state, snapshot(undisturbed))


@pytest.mark.parametrize(("logits", "rows"), [("all", 5), ("last", 1), ("none", 0)])
def test_logits_of_the_rows_that_were_asked_for(
    logits: Any, rows: int, golden_model: Clover, empty_state: EmptyState
) -> None:
    config = golden_model.config
    tokens = token_ids(5, config)
    out = golden_model.commit(torch.tensor(tokens), empty_state(config), logits=logits)
    every = golden_model.commit(tokens, empty_state(config), logits="all")
    assert out.logits.shape == (rows, config.vocab_size)
    torch.testing.assert_close(out.logits, every.logits[5 - rows :])
    assert [ids.shape for ids in out.expert_ids] == [(5, 2)] * 4


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ([], "0 tokens"),
        ([3] * 11, "11 tokens for a pass, room for 1 to 10"),
        ([3, 512], "token id 512, vocab_size is 512"),
        ([-1], "token id -1"),
    ],
)
@pytest.mark.parametrize("kind", ["commit", "preview"])
def test_tokens_that_cannot_run_are_refused(
    kind: str, tokens: list[int], says: str, golden_model: Clover
) -> None:
    state = SequenceState(golden_model.config, context=10, device="cpu", dtype=torch.float32)
    with pytest.raises(ValueError, match=says):
        getattr(golden_model, kind)(tokens, state)
    assert state.length == 0


def test_model_without_diffusion_tensors_commits_and_refuses_to_preview(
    odd_config: ModelConfig, random_parameters: RandomParameters, empty_state: EmptyState
) -> None:
    families = ("conv_right_weight", "bd_softmax_")
    parameters = {
        name: value
        for name, value in random_parameters(odd_config).items()
        if not any(family in name for family in families)
    }
    experts = ResidentExperts(taken_experts(parameters))
    model = Clover(odd_config, {**parameters}, experts=experts, device="cpu", dtype=torch.float32)
    assert not model.can_preview
    state = empty_state(odd_config)
    model.commit([1, 2, 3], state)
    with pytest.raises(ValueError, match="no diffusion tensors"):
        model.preview([4, 5], state)


def test_parameters_that_do_not_fit_are_named(
    odd_config: ModelConfig, random_parameters: RandomParameters
) -> None:
    missing, surplus = random_parameters(odd_config), random_parameters(odd_config)
    del missing["layers.3.self_attn.k_norm.weight"]
    surplus["layers.5.mlp.gate.weight"] = torch.zeros(1)
    for parameters, name in (
        (missing, r"layers\.3\.self_attn\.k_norm\.weight is missing"),
        (surplus, r"left over: layers\.5\.mlp\.gate\.weight"),
    ):
        experts = ResidentExperts(taken_experts(parameters))
        with pytest.raises(ValueError, match=name):
            Clover(odd_config, {**parameters}, experts=experts, device="cpu", dtype=torch.float32)


def test_blocked_weights_give_the_same_as_plain_ones(
    odd_config: ModelConfig,
    random_model: RandomModel,
    empty_state: EmptyState,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = replace(odd_config, hidden_size=136, moe_intermediate_size=120)
    outputs = []
    for smallest in (1, 1 << 40):
        monkeypatch.setattr(linear, "BLOCKED_ELEMENTS", smallest)
        model, state = random_model(config), empty_state(config)
        committed = model.commit(token_ids(37, config), state, logits="all").logits
        outputs.append((committed, model.preview([config.mask_token_id] * 7, state).logits))
        (head,) = model.head.lm_head.weights
        assert isinstance(head, torch.Tensor)
        assert head.is_mkldnn == (smallest == 1)
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=2e-5)


def test_bfloat16_model_keeps_float32_where_it_matters(
    odd_config: ModelConfig, random_parameters: RandomParameters, random_model: RandomModel
) -> None:
    parameters = {name: x.bfloat16() for name, x in random_parameters(odd_config).items()}
    experts = ResidentExperts(taken_experts(parameters))
    half = Clover(odd_config, {**parameters}, experts=experts, device="cpu", dtype=torch.bfloat16)
    state = SequenceState(odd_config, context=100, device="cpu", dtype=torch.bfloat16)
    tokens = token_ids(40, odd_config)
    logits = half.commit(tokens, state, logits="all").logits
    assert logits.dtype == torch.float32
    assert {x.dtype for x in (*state.committed.recurrent, *state.committed.conv)} == {torch.float32}
    assert state.keys_values(0)[0].dtype == torch.bfloat16
    full = SequenceState(odd_config, context=100, device="cpu", dtype=torch.float32)
    whole = random_model(odd_config)
    exact = whole.commit(tokens, full, logits="all").logits
    assert (logits - exact).norm() < 0.06 * exact.norm()
    block = [odd_config.mask_token_id] * 9
    previewed, exact = half.preview(block, state).logits, whole.preview(block, full).logits
    assert (previewed - exact).norm() < 0.06 * exact.norm()


def test_embedding_of_another_dtype_is_refused(
    odd_config: ModelConfig, random_parameters: RandomParameters
) -> None:
    parameters = random_parameters(odd_config)
    experts = ResidentExperts(taken_experts(parameters))
    with pytest.raises(ValueError, match=r"float32, the model torch\.bfloat16"):
        Clover(odd_config, {**parameters}, experts=experts, device="cpu", dtype=torch.bfloat16)


def taken_experts(parameters: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Takes the routed experts out of `parameters`."""
    layers = sum(name.endswith("experts.down_proj") for name in parameters)
    return [
        (
            parameters.pop(f"layers.{layer}.mlp.experts.gate_up_proj"),
            parameters.pop(f"layers.{layer}.mlp.experts.down_proj"),
        )
        for layer in range(layers)
    ]
