"""Task `fill-mask`: masked language modeling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..interfaces.task import Task
from ..models.modality_models import TextModel
from ..serving.operations import READS_TEXT, Operation

if TYPE_CHECKING:
    from ..serving.http.endpoints import Endpoint


class ORTModelForMaskedLM(TextModel):
    """Masked language model: `logits: (batch, sequence, vocab_size)`."""

    task = "fill-mask"


class FillMask(Task):
    """The task `fill-mask`: masked language modeling."""

    model = ORTModelForMaskedLM

    def operations(self) -> Sequence[Operation]:
        return (FillMaskOperation(),)


class FillMaskOperation(Operation):
    """Operation that returns likely tokens for each mask token."""

    name = "fill-mask"
    reads = READS_TEXT

    def columns(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        import pyarrow as pa

        fill = {"mask": pa.int64(), "token_str": pa.string(), "token": pa.int64(), "score": pa.float64()}
        return {"fills": pa.list_(pa.struct(fill))}

    def values(self, answer: Any, options: Mapping[str, Any]) -> Mapping[str, Any]:
        masks = answer if answer and isinstance(answer[0], list) else [answer]
        return {"fills": [{**fill, "mask": number} for number, fills in enumerate(masks) for fill in fills]}

    def endpoint(self) -> Endpoint:
        from pydantic import Field

        from ..serving.http.endpoints import Endpoint
        from ..serving.http.text_bodies import TextsBody, pipeline_answer

        class FillMaskBody(TextsBody):
            """Body of `/fill-mask`."""

            top_k: int = Field(default=5, ge=1, le=1000)

        return Endpoint(
            path="/fill-mask",
            answer=pipeline_answer(self.name, "top_k"),
            body=FillMaskBody,
            summary="Return likely tokens for each mask token of a text",
            tag="tasks",
            operation=self.name,
            example={"inputs": "I lost my [MASK]."},
        )
