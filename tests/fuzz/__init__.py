"""Many random configurations, arguments and damaged files: `make fuzz`."""
