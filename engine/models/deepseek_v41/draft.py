"""One draft of DSpark: a block of tokens guessed in one pass, and how sure each guess is.

Whether to draft, how many of the guesses to verify and which to accept is decided elsewhere.
Nothing is written: the rows of a draft are gone when it returns.
"""

from dataclasses import dataclass, replace

import torch

from .attention import project_output, queries, query_latents, window_rows
from .config import DeepseekV41Config
from .model import DeepseekV41
from .residual import Residual, begin_residual
from .rows import Chunk, RowBatch, WindowView, plan_rows, window_index
from .state import SequenceState
from .weights import DraftWeights, LayerWeights


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """`token_ids` int64 [B] by greedy choice, `logits` float32 [B, V] of each, given those before,
    `confidence` float32 [B]: raw, before a temperature and the sigmoid."""

    token_ids: torch.Tensor
    logits: torch.Tensor
    confidence: torch.Tensor


class Drafter:
    """Drafts for sequences of one model; the model has draft weights."""

    def __init__(self, model: DeepseekV41) -> None:
        assert model.weights.draft is not None, "the model has no draft stages"
        self._model = model
        self._weights: DraftWeights = model.weights.draft
        self._config: DeepseekV41Config = model.config

    @torch.inference_mode()
    def draft(self, state: SequenceState, token_id: int) -> Draft:
        """Guess the tokens after `token_id`, which is known and comes right after the state's."""
        config, model = self._config, self._model
        assert 0 <= token_id < config.vocabulary, (token_id, config.vocabulary)
        noise = [config.draft.noise_token_id] * (config.draft.block_tokens - 1)
        chunk = Chunk(state=state, token_ids=[token_id, *noise])
        embedding = model.weights.embedding
        rows = plan_rows([chunk], model.frequencies, embedding.device)
        embedding_BE = embedding[torch.tensor(chunk.token_ids, device=embedding.device)].float()
        residual = begin_residual(embedding_BE, config.streams)
        rows = self._see_block(rows)
        for stage, layer in enumerate(self._weights.stages):
            residual = self._run_stage(config.layers + stage, layer, rows, residual)
        return self._choose(model.mixer.collapse(residual), token_id, rows)

    def _see_block(self, rows: RowBatch) -> RowBatch:
        """Every guess sees the window before the block, and the whole block."""
        (span,) = rows.spans
        window = self._config.window
        base = max(span.state.decoder_window_start, span.first - window, 0)
        last = torch.full_like(span.positions_T, span.first - 1)
        before_BW = window_index(last, window, base, base)
        block_BB = (span.positions_T - base).expand(len(last), -1)
        index_BW = torch.cat((before_BW, block_BB), dim=1)
        return replace(rows, windows=(WindowView(base=base, index_TW=index_BW),))

    def _run_stage(
        self, ring: int, layer: LayerWeights, rows: RowBatch, residual: Residual
    ) -> Residual:
        mixer = self._model.mixer
        x_BE = mixer.enter(residual, layer.attention_norm)
        y_BE = self._attend(ring, layer, x_BE, rows)
        residual = mixer.leave(residual, y_BE, layer.attention_mix, rows)
        x_BE = mixer.enter(residual, layer.experts_norm)
        y_BE = self._model.feed_forward.run(
            layer.experts,
            x_BE,
            rows,
            experts_per_token=self._config.draft.experts_per_token,
            layer=ring,
        )
        return mixer.leave(residual, y_BE, layer.experts_mix, rows)

    def _attend(
        self, ring: int, layer: LayerWeights, x_BE: torch.Tensor, rows: RowBatch
    ) -> torch.Tensor:
        config, operations = self._config, self._model.operations
        (span,), (view,) = rows.spans, rows.windows
        weights = layer.attention
        q_latent = query_latents(config, operations, weights, x_BE, rows)
        q_BHD = queries(config, operations, weights, q_latent, rows, rows.rope)
        block_BB = window_rows(config, operations, weights, x_BE, rows, rows.rope)
        before = span.state.read_window_rows(ring, view.base, span.first)
        window_ND = operations.dequantise_window_rows(torch.cat((before, block_BB)), torch.float32)
        o_BHD = operations.sparse_attention(
            q_BHD,
            window_ND,
            view.index_TW,
            None,
            None,
            weights.sink,
            config.softmax_scale,
            span.tiles,
        )
        return project_output(config, operations, weights, o_BHD, rows, rows.rope)

    def _choose(self, hidden_BE: torch.Tensor, token_id: int, rows: RowBatch) -> Draft:
        """Greedy, one after the other: each guess shifts the logits of the next (Markov head)."""
        model, weights = self._model, self._weights
        normed_BE = model.operations.rms_norm(hidden_BE, weights.norm, self._config.norm_epsilon)
        base_BV = model.operations.linear(normed_BE, model.weights.head, rows.tiles)
        token_ids, logits, confidence = [], [], []
        previous = token_id
        for step in range(len(hidden_BE)):
            markov = weights.markov_embedding[previous]
            logits.append(base_BV[step] + torch.mv(weights.markov_head, markov))
            features = torch.cat((hidden_BE[step], markov)).to(weights.confidence.dtype)
            confidence.append(torch.mv(weights.confidence, features))
            previous = int(logits[-1].argmax())
            token_ids.append(previous)
        return Draft(torch.tensor(token_ids), torch.stack(logits), torch.cat(confidence))
