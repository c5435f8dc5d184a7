"""The demo's checkpoint: a tiny DeepSeek-V3 that has read this project's documents, and the program that trains it."""
