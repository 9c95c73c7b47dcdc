"""The executor: requests, managers of resources, model engine, graphs."""
