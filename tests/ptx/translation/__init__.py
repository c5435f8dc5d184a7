"""PTX to host code: what the compiler made of a kernel, resumable at every event."""
