"""Folders, configs, versions and their life. Nothing here knows a request.

Import from the modules: `catalog` (what is served), `version` (a version and its life as a
table), `model_config` (model.yaml), `signature`, `repository` (load, unload, poll), `check`.
"""
