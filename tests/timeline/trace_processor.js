// Perfetto's trace_processor, compiled to WebAssembly, speaking its RPC protocol on standard input and output.
//
//     node trace_processor.js FOLDER    # of engine_bundle.js and its .wasm, as Perfetto's UI ships them
//
// The bundle is a browser's worker: it gets a worker's names here, and a port that is the two streams.
const fs = require('fs');
const path = require('path');
const { stdin, stdout, stderr, exit } = process;
const folder = process.argv[2];

globalThis.self = globalThis;
globalThis.WorkerGlobalScope = class {};
globalThis.importScripts = () => {};
globalThis.location = { href: 'https://localhost/engine_bundle.js' };
globalThis.XMLHttpRequest = class {
  open(method, name) { this.name = path.basename(name); }
  send() { this.response = fs.readFileSync(path.join(folder, this.name)); }
};
console.log = console.warn = console.error = (...words) => stderr.write(words.join(' ') + '\n');
globalThis.process = undefined;  // else the bundle takes node for a place that it was not built for

require('vm').runInThisContext(fs.readFileSync(path.join(folder, 'engine_bundle.js'), 'utf8'));
const port = { postMessage: (bytes) => stdout.write(Buffer.from(bytes)) };
globalThis.onmessage({ data: port });
setImmediate(() => {
  stdin.on('data', (bytes) => port.onmessage({ data: new Uint8Array(bytes) }));
  stdin.on('end', () => exit(0));
});
