"""Serving: many callers' inputs in few calls of the model, in this process or over HTTP.

In: opened models and inputs of many callers at once. Out: the answers that the stock pipelines give, sooner. `engine` is the
public face; `model_queue` holds one model's queue and threads, `batching` decides what runs together, `pipeline_work` is what is done
to inputs (a new kind of work is a class there and a line in `pipeline_work.KINDS`). `http` puts an engine behind a server: a new
protocol is a module there with a table of endpoints. `ray` puts that server on a cluster, and `batch` answers whole tables.
"""
