"""What measures. Of team, problem, timing, peak_memory, libraries, ours, peers, accuracy, report, measure, ways,
snapshots and options each uses only modules before it."""
