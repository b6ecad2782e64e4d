"""seeded_sampling: the tokens of ``generate`` by ``fusedops.sample``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

from fusedops.errors import InvalidInputError
from fusedops.ops.sampling.sample import sample


class _SeededSampling(LogitsProcessor):
    """Leaves one finite score in each row: that of the token that is drawn."""

    def __init__(self, seed: int | Tensor, prompt: int, options: dict[str, Any]) -> None:
        self._seed, self._prompt, self._options = seed, prompt, options

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        prompt, length = self._prompt, input_ids.shape[1]
        if type(prompt) is not int or not 0 <= prompt <= length:
            raise InvalidInputError(
                f"seeded_sampling: got prompt = {prompt!r}, expected 0 to {length}, the tokens that generate has; to "
                f"fix: pass prompt=input_ids.shape[1], or 1 for a model with a decoder of its own"
            )
        token = sample(scores, seed=self._seed, position=length - prompt, **self._options)
        assert isinstance(token, Tensor)
        drawn = torch.full_like(scores, -torch.inf).scatter(-1, token.clamp(min=0)[:, None], 0.0)
        return drawn.masked_fill((token < 0)[:, None], torch.nan)  # without a token torch.multinomial reports the row


def seeded_sampling(
    seed: int | Tensor,
    prompt: int,
    *,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    backend: str | None = None,
) -> LogitsProcessor:
    """Return a logits processor with which ``generate`` draws by :func:`fusedops.sample`: the tokens follow from seeds.

    Pass it as ``model.generate(ids, logits_processor=[seeded_sampling(7, ids.shape[1])])``. A request has the same
    answer alone, beside others and behind padding, as far as the model's logits are the same bits: the noise is of the
    request's seed and of the number of the new token. Temperature and filters of ``generate`` do not apply; give them
    here. ``generate_batch`` takes no processors but those of its generation config, so it cannot draw by this one.

    Args:
        seed: of every request, or a tensor (N,) of one for each row, as for several answers to one prompt.
        prompt: the tokens before the first new one, with padding: ``ids.shape[1]``, or 1 where a decoder begins by one
            token of its own.
        temperature: this and the next three as of :func:`fusedops.sample`.
        top_k: see there.
        top_p: see there.
        min_p: see there.
        backend: see there.

    Raises:
        InvalidInputError: by ``generate``, if an argument is not as above.

    >>> import torch
    >>> from fusedops.integrations.transformers import seeded_sampling
    >>> draw = seeded_sampling(7, 2, top_k=2)
    >>> draw(torch.tensor([[5, 6]]), torch.tensor([[1.0, 2.0, 3.0]]))
    tensor([[-inf, 0., -inf]])
    """
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "backend": backend}
    return _SeededSampling(seed, prompt, options)
