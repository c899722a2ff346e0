"""Programs that other runtimes' interpreters run; they import nothing of specdec."""
