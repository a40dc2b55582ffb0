"""The explorer: a local page with controls for the parts of a network, which shows how its tokens collapse.

`commands.py` has the command `rankscope explore`, and the page of `rankscope follow`.

`server.serve` runs the page; `api.app` is the page with its API; `page.Guard` stands before every request;
`controls.Controls` is all that a page can ask for; `network_cache.NetworkCache` has the networks; `jobs.Jobs`
lets one computation run at a time; `answers.measure_page` measures, and `answers.Answers` makes of it
what the page shows. `follow.py` is the page of a training run.
"""
