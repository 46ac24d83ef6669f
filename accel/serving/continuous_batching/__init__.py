"""Generation for many callers at once: rows join and leave one running batch between its steps.

In: prompts as token ids, and their options (`accel.decoding.generation_options`). Out: tokens as they are generated.
`generation_engine` takes and returns texts; a `scheduler` owns a model and the thread that runs it; `running_rows` holds the rows that
are computed together, over the step and the choice of tokens of `accel.decoding`; `token_stream` is one answer while it is generated.
"""
