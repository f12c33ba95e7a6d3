/*
 * Preloaded in the machine. A real adapter takes a retry count of 7 as seven tries; soft-RoCE takes it as "for ever".
 * Mooncake always sets 7, so without this nothing would ever fail there. Six is six for both.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <infiniband/verbs.h>

typedef int modify_fn(struct ibv_qp *, struct ibv_qp_attr *, int);

int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attributes, int mask)
{
    static modify_fn *real;
    if (!real) /* by name: what Python loads is not in the global order that RTLD_NEXT follows */
        real = (modify_fn *)dlvsym(dlopen("libibverbs.so.1", RTLD_NOW), "ibv_modify_qp", "IBVERBS_1.1");
    struct ibv_qp_attr finite = *attributes;
    if ((mask & IBV_QP_RETRY_CNT) && finite.retry_cnt == 7)
        finite.retry_cnt = 6;
    return real(qp, &finite, mask);
}
