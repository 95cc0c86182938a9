// A client of omnid, made from the contract's descriptor image alone: no generated code.
//
//   node client.mjs TARGET list
//   node client.mjs TARGET generate REQUEST           one request, REQUEST is a GenerateRequest in JSON
//   node client.mjs TARGET attach REQUEST [REQUEST..] many requests on one stream, with credits
//   node client.mjs TARGET cancel REQUEST             cancels after the first output
//
// Prints one JSON object a line. Exit status 1 when a call fails; the last line is then the error: code, message,
// reason and metadata of its ErrorInfo, and the fields of its BadRequest.

import { readFileSync } from "node:fs";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const IMAGE = new URL("../../../protos/omni.binpb", import.meta.url);
const OPTIONS = { keepCase: true, longs: String, enums: String, bytes: String, defaults: false, oneofs: true };

const definition = protoLoader.loadFileDescriptorSetFromBuffer(readFileSync(IMAGE), OPTIONS);
const { OmniService } = grpc.loadPackageDefinition(definition).omni.v1;

const [target, command, ...given] = process.argv.slice(2);
const requests = given.map((text) => toRequest(JSON.parse(text)));
const client = new OmniService(target, grpc.credentials.createInsecure(), {
  "grpc.max_receive_message_length": 65 * 1024 * 1024,
  "grpc.max_send_message_length": 65 * 1024 * 1024,
});

const print = (object) => console.log(JSON.stringify(object));

/** A map field: protobufjs reads a descriptor's maps as what they are on the wire, a list of entries. */
function toEntries(map, convert) {
  return Object.entries(map ?? {}).map(([key, value]) => ({ key, value: convert(value) }));
}

const fromEntries = (entries) => Object.fromEntries((entries ?? []).map(({ key, value }) => [key, value]));

/** A plain value as google.protobuf.Value. */
function toValue(value) {
  if (value === null) return { null_value: 0 };
  if (Array.isArray(value)) return { list_value: { values: value.map(toValue) } };
  const named = { number: "number_value", string: "string_value", boolean: "bool_value" }[typeof value];
  return named ? { [named]: value } : { struct_value: toStruct(value) };
}

function toStruct(object) {
  return { fields: toEntries(object, toValue) };
}

/** A GenerateRequest as proto3's JSON has it, as proto-loader takes it. */
function toRequest(request) {
  const toParams = (params) => ({ ...params, extra: params.extra && toStruct(params.extra) });
  return { ...request, params: toEntries(request.params, toParams) };
}

/** An unary call, as a promise. */
const unary = (method, message) =>
  new Promise((resolve, reject) =>
    client[method](message, { deadline: Date.now() + 30000 }, (error, answer) =>
      error ? reject(error) : resolve(answer)
    )
  );

/** Reads the details of a google.rpc.Status with the types of the contract's image. */
function details(status) {
  const found = {};
  for (const any of status.details ?? []) {
    const name = any.type_url.split("/").pop();
    found[name] = definition[name].deserialize(Buffer.from(any.value, "base64"));
  }
  const info = found["google.rpc.ErrorInfo"] ?? {};
  return {
    reason: info.reason,
    domain: info.domain,
    metadata: fromEntries(info.metadata),
    fields: found["google.rpc.BadRequest"]?.field_violations,
    retry: found["google.rpc.RetryInfo"]?.retry_delay,
  };
}

/** What an event says, in short. */
function summary(event) {
  const payload = event.output?.payload;
  return {
    request: event.request,
    index: event.index ?? "0",
    kind: event.event,
    request_id: event.accepted?.request_id,
    stage: event.output?.stage ?? event.stage_finished?.stage,
    text: payload?.text,
    media: payload?.media?.map((piece) => ({
      type: piece.mime_type,
      bytes: Buffer.from(piece.data ?? "", "base64").length,
      last: piece.last,
    })),
    reason: event.finished?.reason,
    error: event.failed && { message: event.failed.message, ...details(event.failed) },
  };
}

async function list() {
  const { models } = await unary("ListModels", {});
  models.forEach(print);
}

async function generate(onEvent = () => {}) {
  const call = client.Generate(requests[0], { deadline: Date.now() + 60000 });
  for await (const { events } of call) {
    for (const event of events) {
      print(summary(event));
      onEvent(event);
    }
  }
}

async function cancel() {
  let requestId;
  let cancelling;
  const cancelAtOutput = (event) => {
    requestId ??= event.accepted?.request_id;
    if (event.output && !cancelling) cancelling = unary("Cancel", { request_id: requestId });
  };
  await generate(cancelAtOutput);
  print({ kind: "cancel", ...(await cancelling) });
}

async function attach() {
  const call = client.Attach({ deadline: Date.now() + 60000 });
  call.write({ commands: requests.map((start, index) => ({ request: index + 1, start })) });
  let open = requests.length;
  for await (const { events } of call) {
    const taken = events.filter((event) => event.output).map((event) => event.request);
    if (taken.length) call.write({ credits: taken });
    for (const event of events) {
      print(summary(event));
      if (event.finished || event.failed) open -= 1;
    }
    if (open === 0) call.end();
  }
}

try {
  await { list, generate, cancel, attach }[command]();
} catch (error) {
  const [bytes] = error.metadata?.get("grpc-status-details-bin") ?? [];
  const status = bytes ? definition["google.rpc.Status"].deserialize(bytes) : {};
  print({ kind: "error", code: grpc.status[error.code], message: error.details ?? String(error), ...details(status) });
  process.exitCode = 1;
} finally {
  client.close();
}
