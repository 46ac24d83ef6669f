"""Predefined calibration data sets of optimum-intel. accel downloads only the rows that it needs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from ...errors import ArtifactNotFoundError, ConfigError

# Arguments of `datasets.load_dataset` for each data set, by the name in optimum-intel.
PREDEFINED: Mapping[str, Mapping[str, Any]] = {
    "librispeech": {
        "path": "openslr/librispeech_asr",
        "data_dir": "clean",
        "split": "validation",
        "revision": "refs/convert/parquet",
    },
    "wikitext2": {"path": "Salesforce/wikitext", "name": "wikitext-2-raw-v1", "split": "train"},
    "c4": {"path": "allenai/c4", "name": "en", "split": "train"},
}
OTHERS = ("auto", "c4-new", "gsm8k", "conceptual_captions", "contextual", "textvqa", "coco")


def predefined_rows(word: str, count: int) -> Any:
    """Return the first rows of a predefined data set as a `datasets.Dataset`. Rows with an empty text are skipped.

    Audio files are not decoded.

    Raises:
        ConfigError: accel does not support this data set of optimum-intel.
        ArtifactNotFoundError: The data set cannot be downloaded.
    """
    import datasets

    if word in OTHERS:
        raise ConfigError(
            f"accel does not support the predefined data set dataset={word!r} of optimum-intel.",
            fix=f"pass one of {', '.join(PREDEFINED)}, a list of texts or the name of a data set as dataset, or pass "
            "calibration_dataset=rows.",
        )
    try:
        stream = datasets.load_dataset(**PREDEFINED[word], streaming=True)
        for name, feature in (stream.features or {}).items():
            if isinstance(feature, datasets.Audio):
                stream = stream.cast_column(name, datasets.Audio(feature.sampling_rate, decode=False))
        rows = list(itertools.islice((row for row in stream if _holds_something(row)), count))
    except (datasets.exceptions.DatasetsError, OSError, RuntimeError) as error:
        raise ArtifactNotFoundError(
            f"The data set {PREDEFINED[word]['path']!r} cannot be downloaded from the Hub: {error}",
            fix="check the network connection, or pass calibration_dataset=rows.",
        ) from error
    if stream.features is None:
        return datasets.Dataset.from_list(rows)
    # `Dataset.from_list` would need an audio decoder, so the data set is built from an Arrow table.
    return datasets.Dataset(datasets.table.InMemoryTable.from_pylist(rows, schema=stream.features.arrow_schema))


def _holds_something(row: Mapping[str, Any]) -> bool:
    return not isinstance(row.get("text"), str) or bool(row["text"].strip())
