"""Wrapper of models with an x-vector head (speaker verification), so that the models can be traced."""

from __future__ import annotations

from typing import Any

import torch

from ..interfaces.tracing_wrapper import Tensors, Wrapper
from ..upstream.model_internals import lengths_of_tdnn


class VoiceEmbedder(Wrapper):
    """A model with an x-vector head that can be traced.

    transformers' code processes the rows of a padded batch in a Python loop, and a graph of this code would accept only the batch size of
    the sample. In a trace, this class pools all rows at once. Outside of a trace, it runs transformers' code.

    The outputs are `logits: (batch, speakers)` and `embeddings: (batch, xvector_output_dim)`.
    """

    def forward(self, attention_mask: torch.Tensor | None = None, **inputs: torch.Tensor) -> Tensors:
        """Run the model. In a trace, compute the mean and standard deviation over all frames that are not padding."""
        model: Any = self.model
        if attention_mask is None or not torch.compiler.is_exporting():
            output = model(attention_mask=attention_mask, **inputs)
            return {"logits": output.logits, "embeddings": output.embeddings}
        weighted = bool(model.config.use_weighted_layer_sum)
        encoder = getattr(model, model.base_model_prefix)
        encoded = encoder(attention_mask=attention_mask, output_hidden_states=weighted, **inputs)
        hidden = encoded.last_hidden_state
        if weighted:
            weights = torch.nn.functional.softmax(model.layer_weights, dim=-1).view(-1, 1, 1)
            hidden = (torch.stack(encoded.hidden_states, dim=1) * weights).sum(dim=1)
        hidden = model.projector(hidden)
        for layer in model.tdnn:
            hidden = layer(hidden)
        lengths = lengths_of_tdnn(model, attention_mask.sum(dim=1))
        frame_mask = (torch.arange(hidden.shape[1], device=hidden.device) < lengths[:, None]).unsqueeze(-1)
        count = frame_mask.sum(dim=1)
        mean = (hidden * frame_mask).sum(dim=1) / count
        squares = ((hidden - mean.unsqueeze(1)) ** 2 * frame_mask).sum(dim=1)
        pooled = torch.cat([mean, (squares / (count - 1)).sqrt()], dim=-1)
        embeddings = model.feature_extractor(pooled)
        return {"logits": model.classifier(embeddings), "embeddings": embeddings}
