"""Audit of servers: compare the answers of any HTTP server with PyTorch on the same texts.

In: the URL of a server of embeddings, rankings, classes or chats (accel, text-embeddings-inference, infinity, vLLM and other servers with
OpenAI's API, Triton), and a model. Out: a table of checks, each with the difference and, if a check fails, the likely cause.

`requests` sends requests and reads the answers of each API. `references` computes the answers with PyTorch. `checks` compares them.
"""
