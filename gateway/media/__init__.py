"""Media of requests: taken apart and held against the model's limits before anything is decoded."""
