"""The oracle: what every field must be, written from each request's history. Plain Python, one request at a time.

It knows neither pages, nor batched tensors, nor anything that an engine updates in place: a length is a sum over
what the request lived through, a token is the target's greedy choice after the tokens before it.
"""

from reference.executor import Session, trace

__all__ = ["Session", "trace"]
