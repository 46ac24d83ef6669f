"""Load tests: requests that arrive as they do in life, whatever the server does, and how long each waited for its answer.

`targets` knows what to send where (a new endpoint is a line there), `client` speaks HTTP, `running` lets requests arrive and counts,
`finding` looks for the highest rate that a server bears, `page` shows it, and `metrics` reads what the server counted itself.
"""
