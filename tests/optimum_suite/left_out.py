"""Optimum's tests that are not run or whose failures are not counted, with the reasons. Patterns match
`file::Class::test`.
"""

from __future__ import annotations

import fnmatch

# These tests are not run.
LEFT_OUT = {
    "*internlm2*": "the model is code in a repository of the Hub",
    "*_trust_remote_code": "the model is code in a repository of the Hub",
    "*mxfp4*": "weights in MXFP4, which no local model has",
    "*mctct*": "an architecture that transformers 5 no longer has",
    "*::test_load_model_from_cache": "clears the Hub's cache",
    "*::test_load_model_from_empty_cache": "clears the Hub's cache",
    "*::test_inference_old_onnx_model*": "trained models of the Hub, as an old Optimum wrote them",
    "*::test_find_untested_architectures*": "reads Optimum's tables of architectures",
    "*::test_all_models_requiring_position_ids": "reads Optimum's tables of architectures",
}
# These tests are run. If only the text of an error message differs, the result counts as left out.
READS_WORDS = (
    "*::test_load_vanilla_transformers_which_is_not_supported",
    "*::test_load_model_which_is_not_supported",
    "*::test_missing_execution_provider",
    "*::test_fail_from_pretrained_method",
    "*::test_merged_optimization",
)
WORDS = "reads the words of an error"


def reason(test: str) -> str | None:
    """Return the reason why a test is not run, or `None` if the test is run."""
    return next((why for pattern, why in LEFT_OUT.items() if fnmatch.fnmatchcase(test, pattern)), None)


def only_words_differ(test: str, error: BaseException) -> bool:
    """Return whether a test got the expected error with a different message."""
    reads = any(fnmatch.fnmatchcase(test, pattern) for pattern in READS_WORDS)
    return reads and isinstance(error, AssertionError) and "not raised" not in str(error)
