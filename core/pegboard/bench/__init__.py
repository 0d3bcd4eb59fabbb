"""`pegboard bench`: a mixed load over HTTP, measured by its clients.

`options` reads the flags, `prompts` and `arrivals` make the load, `load` runs it with one `exchange` a
request, `server_metrics` watches the server meanwhile, `report` counts, `page` and `charts` show it.
"""
