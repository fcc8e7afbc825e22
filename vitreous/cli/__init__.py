"""The command line: one small file per verb, heavy imports inside the verb."""
