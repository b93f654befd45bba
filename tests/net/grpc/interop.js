// gRPC's interoperability cases by their names, with @grpc/grpc-js. One line for each: `NAME ok`, or what failed.
//
//   node interop.js HOST:PORT        in a folder that has node_modules/@grpc/grpc-js
"use strict";
const path = require("path");
const grpc = require(path.join(process.cwd(), "node_modules", "@grpc", "grpc-js"));

const client = new grpc.Client(process.argv[2], grpc.credentials.createInsecure());
const S = "/grpc.testing.TestService/", TRAILING = "x-grpc-test-echo-trailing-bin";
const LARGE = Buffer.concat([Buffer.from("314159"), Buffer.alloc(271822)]);
const SPECIAL = "\t\ntest with whitespace\r\nand Unicode BMP \u263a and non-BMP \ud83d\ude08\t\n";
const same = bytes => bytes, text = value => Buffer.from(String(value));

function must(truth, what) {
  if (!truth) throw new Error(what);
}

function named(values) {
  const metadata = new grpc.Metadata();
  for (const [name, value] of Object.entries(values || {})) metadata.set(name, value);
  return metadata;
}

function unary(method, body, {metadata, options} = {}) {
  const name = method.startsWith("/") ? method : S + method;
  return new Promise(done => {
    let found = {};
    const call = client.makeUnaryRequest(name, same, same, body, named(metadata), options || {}, (fault, reply) => {
      found.fault = fault;
      found.reply = reply;
    });
    call.on("status", status => setImmediate(() => done({...found, trailing: status.metadata})));
  });
}

// What a call that gives pieces has given, and its status. `write` sends requests.
function pieces(call, write) {
  return new Promise(done => {
    const found = [];
    call.on("data", piece => found.push(piece.length));
    call.on("error", () => {});
    call.on("status", status => done({found, code: status.code, details: status.details, trailing: status.metadata}));
    if (write) write(call, found);
  });
}

function duplex(write, {method = "FullDuplexCall", metadata, options} = {}) {
  return pieces(client.makeBidiStreamRequest(S + method, same, same, named(metadata), options || {}), write);
}

function all(...requests) {
  return call => {
    for (const request of requests) call.write(text(request));
    call.end();
  };
}

function streamedIn(options) {
  return new Promise(done => {
    const call = client.makeClientStreamRequest(S + "StreamingInputCall", same, same, named(), options || {},
      (fault, reply) => done({fault, reply, call}));
    for (const size of [27182, 8, 1828, 45904]) call.write(Buffer.alloc(size));
    call.end();
  });
}

function streamedOut(request) {
  return pieces(client.makeServerStreamRequest(S + "StreamingOutputCall", same, same, text(request)));
}


// A client of its own, that compresses what it sends with gzip (2) or deflate (1).
async function compressing(ask) {
  for (const algorithm of [1, 2]) {
    const options = {"grpc.default_compression_algorithm": algorithm};
    const other = new grpc.Client(process.argv[2], grpc.credentials.createInsecure(), options);
    try {
      await ask(other);
    } finally {
      other.close();
    }
  }
}

const CASES = {
  async empty_unary() {
    must((await unary("EmptyCall", Buffer.alloc(0))).reply.length === 0, "a reply that is empty");
  },
  async large_unary() {
    must((await unary("UnaryCall", LARGE)).reply.length === 314159, "its length");
  },
  async client_compressed_unary() {
    await compressing(other => new Promise((done, fail) => {
      other.makeUnaryRequest(S + "UnaryCall", same, same, LARGE, (fault, reply) =>
        fault ? fail(fault) : done(must(reply.length === 314159, "its length")));
    }));
  },
  async server_compressed_unary() {
    must((await unary("UnaryCall", text("packed 314159"))).reply.length === 314159, "its length");
  },
  async client_streaming() {
    must((await streamedIn()).reply.toString() === "74922", "the sum");
  },
  async client_compressed_streaming() {
    await compressing(other => new Promise((done, fail) => {
      const call = other.makeClientStreamRequest(S + "StreamingInputCall", same, same, (fault, reply) =>
        fault ? fail(fault) : done(must(reply.toString() === "74922", "the sum")));
      for (const size of [27182, 8, 1828, 45904]) call.write(Buffer.alloc(size));
      call.end();
    }));
  },
  async server_streaming() {
    must((await streamedOut("31415 9 2653 58979")).found.join() === "31415,9,2653,58979", "the lengths");
  },
  async server_compressed_streaming() {
    must((await streamedOut("packed 31415 92653")).found.join() === "31415,92653", "the lengths");
  },
  async ping_pong() {
    const sizes = [31415, 9, 2653, 58979];
    const {found, code} = await duplex((call, found) => {
      call.on("data", () => found.length < 4 ? call.write(text(sizes[found.length])) : call.end());
      call.write(text(sizes[0]));
    });
    must(code === 0 && found.join() === sizes.join(), "the lengths");
  },
  async empty_stream() {
    const {found, code} = await duplex(all());
    must(code === 0 && found.length === 0, "no reply");
  },
  async cancel_after_begin() {
    const code = await new Promise(done => {
      const call = client.makeClientStreamRequest(S + "StreamingInputCall", same, same, fault => done(fault.code));
      setImmediate(() => call.cancel());
    });
    must(code === 1, "CANCELLED");
  },
  async cancel_after_first_response() {
    const {found, code} = await duplex(call => {
      call.on("data", () => call.cancel());
      call.write(text(31415));
    });
    must(code === 1 && found.join() === "31415", "CANCELLED");
  },
  async timeout_on_sleeping_server() {
    const options = {deadline: Date.now() + 50};
    const {code} = await duplex(call => call.write(Buffer.alloc(27182)), {method: "Sleeping", options});
    must(code === 4, "DEADLINE_EXCEEDED");
  },
  async custom_metadata() {
    const bytes = Buffer.from([0xab, 0xab, 0xab]), metadata = {[TRAILING]: bytes};
    const one = await unary("UnaryCall", text(3), {metadata});
    must(one.reply.length === 3 && one.trailing.get(TRAILING)[0].equals(bytes), "of a unary call");
    const many = await duplex(all(3), {metadata});
    must(many.found.join() === "3" && many.trailing.get(TRAILING)[0].equals(bytes), "of a stream");
  },
  async status_code_and_message() {
    const {fault} = await unary("UnaryCall", text("status test status message"));
    must(fault.code === 2 && fault.details === "test status message", "of a unary call");
    const {code, details} = await duplex(all("status test status message"));
    must(code === 2 && details === "test status message", "of a stream");
  },
  async special_status_message() {
    const {fault} = await unary("UnaryCall", text("status " + SPECIAL));
    must(fault.code === 2 && fault.details === SPECIAL, "the text");
  },
  async unimplemented_method() {
    must((await unary("UnimplementedCall", Buffer.alloc(0))).fault.code === 12, "UNIMPLEMENTED");
  },
  async unimplemented_service() {
    const {fault} = await unary("/grpc.testing.UnimplementedService/UnimplementedCall", Buffer.alloc(0));
    must(fault.code === 12, "UNIMPLEMENTED");
  },
};

(async () => {
  for (const [name, run] of Object.entries(CASES)) {
    try {
      await run();
      console.log(name, "ok");
    } catch (fault) {
      console.log(name, fault.message);
    }
  }
  client.close();
})();
