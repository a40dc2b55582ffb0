"""The explorer: a local page in which the parts of a network are turned, and the collapse follows.

`server.app(shelf, port)` is the page and its API; `answer.parts` computes what it shows, `jobs.Jobs` lets one
computation run at a time, and `settings.Setting` is all that a page can ask for.
"""
