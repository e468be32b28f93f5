"""``bunkbed serve``: rows, neighbours and recommendations over HTTP, while training goes on.

- `settings`: what is served, and the limits of a request;
- `source`: the table or the run, open for reading and following its writer; knows nothing of HTTP;
- `answers`: results as JSON or as Arrow;
- `metrics`: counters for Prometheus;
- `app`: the ASGI application; `workers` starts it in one process or in several.
"""
