"""A span extraction head on a transformers encoder."""

from __future__ import annotations

from typing import Any

import torch
import transformers


class SpanExtractor(transformers.PreTrainedModel):
    """Model that computes, for every label and token, scores for the first and for the last token of a span.

    Labels and text are one sequence, `[CLS] city, person [SEP] Wolfgang lives in Berlin [SEP]`. The model compares the hidden state of
    a label's first token with the hidden states of the text's tokens.

    The config is the encoder's config with one additional field, `span_size`, the size of the compared vectors.
    """

    config_class = transformers.PretrainedConfig
    base_model_prefix = "encoder"
    main_input_name = "input_ids"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        size = config.span_size
        self.encoder = transformers.AutoModel.from_config(config)
        self.tokens = torch.nn.Linear(config.hidden_size, 2 * size)
        self.labels = torch.nn.Linear(config.hidden_size, size)
        self.post_init()

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, label_positions: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Compute `start_logits` and `end_logits: (batch, labels, sequence)`.

        Args:
            input_ids: Token ids, `(batch, sequence)`.
            attention_mask: 1 for tokens and 0 for padding, `(batch, sequence)`.
            label_positions: Index of each label's first token in the sequence, `(batch, labels)`.
        """
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        places = label_positions.unsqueeze(-1).expand(-1, -1, hidden.shape[-1])
        labels = self.labels(hidden.gather(1, places))
        starts, ends = self.tokens(hidden).chunk(2, dim=-1)
        return {
            "start_logits": labels @ starts.transpose(1, 2),
            "end_logits": labels @ ends.transpose(1, 2),
        }
