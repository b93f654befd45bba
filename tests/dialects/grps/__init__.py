"""The grps dialect, its deployments and their code."""
