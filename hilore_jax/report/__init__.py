"""Tables, timings and benches of what the library claims."""
