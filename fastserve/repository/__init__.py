"""Model folders, configs, versions and their life cycle. Nothing here knows a request.

Import from the modules: `catalog` (which versions are served), `version` (a version and its states),
`model_config` (model.yaml), `triton_config` (config.pbtxt), `repository` (load, unload, poll), `check`.
"""
