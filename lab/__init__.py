"""Planning and simulation of deployments, with the production code and the load generator."""
