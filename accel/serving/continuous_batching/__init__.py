"""Continuous batching of text generation: requests of many callers join and leave one running batch between its decoding steps.

In: prompts as token ids, and their options (`accel.decoding.generation_options`). Out: tokens, as soon as they are generated.
`generation_engine` converts between texts and tokens. `scheduler` runs a model in its own thread. `running_rows` contains the rows that
run together; it uses the decoding step and the token selection of `accel.decoding`. `token_stream` contains the tokens of one request
while it is generated.
"""
