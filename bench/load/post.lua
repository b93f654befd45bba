-- Sends one fixed POST over and over; ends with one line `RESULT {json}`.
-- Arguments: BODY_FILE CONTENT_TYPE [NAME VALUE]...   (further headers)
function init(args)
  local file = assert(io.open(args[1], "rb"))
  wrk.method = "POST"
  wrk.body = file:read("*a")
  file:close()
  wrk.headers["Content-Type"] = args[2]
  for i = 3, #args, 2 do
    wrk.headers[args[i]] = args[i + 1]
  end
end

function done(summary, latency, requests)
  local errors = summary.errors
  local failed = errors.connect + errors.read + errors.write + errors.status + errors.timeout
  io.write(string.format('RESULT {"requests": %d, "seconds": %.6f, "p50_us": %.0f, "p99_us": %.0f, "failed": %d}\n',
    summary.requests, summary.duration / 1e6, latency:percentile(50), latency:percentile(99), failed))
end
