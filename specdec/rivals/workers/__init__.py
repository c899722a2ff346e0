"""Programs that other runtimes' interpreters run, which therefore import nothing of specdec."""
