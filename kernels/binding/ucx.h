// The part of UCX's interface that ucx.cc uses, so that a build needs no UCX: its package is 43 MB for these lines.
//
// UCX opens this interface by version (ucp_init_version), and reads only the fields of a record that its mask names. So
// a record may end after the last field used here, as it did in a program compiled with an older UCX.
// tests/unit/test_packaging.py compares the names, values, places and types with UCX's own headers.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

typedef enum {
    UCS_OK = 0,
    UCS_INPROGRESS = 1,
    UCS_ERR_NO_MEMORY = -4,
    UCS_ERR_UNREACHABLE = -6,
    UCS_ERR_MESSAGE_TRUNCATED = -9,
    UCS_ERR_CANCELED = -16,
    UCS_ERR_LAST = -100
} __attribute__((packed)) ucs_status_t;
typedef void* ucs_status_ptr_t;
// A call under way returns a pointer, any other one its status in the place of the pointer.
#define UCS_STATUS_PTR(_status) (reinterpret_cast<void*>(static_cast<intptr_t>(_status)))
#define UCS_PTR_RAW_STATUS(_ptr) (static_cast<ucs_status_t>(reinterpret_cast<intptr_t>(_ptr)))
#define UCS_PTR_IS_PTR(_ptr) (reinterpret_cast<uintptr_t>(_ptr) - 1 < static_cast<uintptr_t>(UCS_ERR_LAST) - 1)

typedef enum { UCS_THREAD_MODE_SERIALIZED = 1 } ucs_thread_mode_t;
typedef enum ucs_memory_type { UCS_MEMORY_TYPE_HOST = 0 } ucs_memory_type_t;
typedef enum { UCP_ERR_HANDLING_MODE_PEER = 1 } ucp_err_handling_mode_t;
enum { UCP_PARAM_FIELD_FEATURES = 1, UCP_FEATURE_TAG = 1, UCP_WORKER_PARAM_FIELD_THREAD_MODE = 1 };
enum {
    UCP_EP_PARAM_FIELD_REMOTE_ADDRESS = 1,
    UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE = 2,
    UCP_EP_PARAM_FIELD_ERR_HANDLER = 4,
    UCP_EP_CLOSE_FLAG_FORCE = 1
};
enum {
    UCP_OP_ATTR_FIELD_CALLBACK = 2,
    UCP_OP_ATTR_FIELD_USER_DATA = 4,
    UCP_OP_ATTR_FIELD_FLAGS = 16,
    UCP_OP_ATTR_FIELD_MEMORY_TYPE = 64,
    UCP_OP_ATTR_FIELD_RECV_INFO = 128
};

typedef struct ucp_config ucp_config_t;
typedef struct ucp_context* ucp_context_h;
typedef struct ucp_worker* ucp_worker_h;
typedef struct ucp_address ucp_address_t;
typedef struct ucp_ep* ucp_ep_h;
typedef struct ucp_recv_desc* ucp_tag_message_h;
typedef uint64_t ucp_tag_t;

typedef struct ucp_params {
    uint64_t field_mask, features;
} ucp_params_t;

typedef struct ucp_worker_params {
    uint64_t field_mask;
    ucs_thread_mode_t thread_mode;
} ucp_worker_params_t;

typedef struct ucp_err_handler {
    void (*cb)(void* arg, ucp_ep_h ep, ucs_status_t status);
    void* arg;
} ucp_err_handler_t;

typedef struct ucp_ep_params {
    uint64_t field_mask;
    const ucp_address_t* address;
    ucp_err_handling_mode_t err_mode;
    ucp_err_handler_t err_handler;
} ucp_ep_params_t;

typedef struct ucp_tag_recv_info {
    ucp_tag_t sender_tag;
    size_t length;
} ucp_tag_recv_info_t;

typedef struct {
    uint32_t op_attr_mask, flags;
    void* request;
    union {
        void (*send)(void* request, ucs_status_t status, void* user_data);
        void (*recv)(void* request, ucs_status_t status, const ucp_tag_recv_info_t* tag_info, void* user_data);
    } cb;
    uint64_t datatype;
    void* user_data;
    void* reply_buffer;
    ucs_memory_type_t memory_type;
    union {
        size_t* length;
        ucp_tag_recv_info_t* tag_info;
    } recv_info;
} ucp_request_param_t;

const char* ucp_get_version_string();
ucs_status_t ucp_config_read(const char* env_prefix, const char* filename, ucp_config_t** config);
void ucp_config_release(ucp_config_t* config);
ucs_status_t ucp_init_version(unsigned major, unsigned minor, const ucp_params_t* params, const ucp_config_t* config,
                              ucp_context_h* context);
void ucp_cleanup(ucp_context_h context);
ucs_status_t ucp_worker_create(ucp_context_h context, const ucp_worker_params_t* params, ucp_worker_h* worker);
void ucp_worker_destroy(ucp_worker_h worker);
ucs_status_t ucp_worker_get_address(ucp_worker_h worker, ucp_address_t** address, size_t* length);
void ucp_worker_release_address(ucp_worker_h worker, ucp_address_t* address);
unsigned ucp_worker_progress(ucp_worker_h worker);
ucs_status_t ucp_ep_create(ucp_worker_h worker, const ucp_ep_params_t* params, ucp_ep_h* ep);
ucs_status_ptr_t ucp_ep_close_nbx(ucp_ep_h ep, const ucp_request_param_t* param);
ucs_status_ptr_t ucp_ep_flush_nbx(ucp_ep_h ep, const ucp_request_param_t* param);
ucs_status_ptr_t ucp_tag_send_nbx(ucp_ep_h ep, const void* buffer, size_t count, ucp_tag_t tag,
                                  const ucp_request_param_t* param);
ucs_status_ptr_t ucp_tag_send_sync_nbx(ucp_ep_h ep, const void* buffer, size_t count, ucp_tag_t tag,
                                       const ucp_request_param_t* param);
ucs_status_ptr_t ucp_tag_recv_nbx(ucp_worker_h worker, void* buffer, size_t count, ucp_tag_t tag, ucp_tag_t mask,
                                  const ucp_request_param_t* param);
ucp_tag_message_h ucp_tag_probe_nb(ucp_worker_h worker, ucp_tag_t tag, ucp_tag_t mask, int remove,
                                   ucp_tag_recv_info_t* info);
ucs_status_ptr_t ucp_tag_msg_recv_nbx(ucp_worker_h worker, void* buffer, size_t count, ucp_tag_message_h message,
                                      const ucp_request_param_t* param);
ucs_status_t ucp_request_check_status(void* request);
void ucp_request_cancel(ucp_worker_h worker, void* request);
void ucp_request_free(void* request);

}  // extern "C"
