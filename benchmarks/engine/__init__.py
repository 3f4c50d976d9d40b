"""What measures. Of team, timing, problem, peak_memory, report, measure, libraries, ours, peers, accuracy, options and
cells each uses only modules before it."""
