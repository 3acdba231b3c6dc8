"""The HTTP API over a Unix socket (API.md 1): who may call, what a body may hold, and how answers look.

:mod:`routes` says what each path does and knows nothing of HTTP's wire; :mod:`server` knows the wire and nothing of
sandboxes. A :class:`kata_resmgr.problem.Problem` raised anywhere becomes an answer in :mod:`answers` alone.
"""
